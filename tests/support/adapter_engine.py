"""A plain vLLM engine with PEFT adapters, in a process of its own: log-probs of prompts with and without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

OURS = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1",
    "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
}  # fmt: skip


def prompt_logprobs(
    model: Path, prompts: Sequence[Mapping[str, Any]], adapters: Mapping[str, Path], folder: Path
) -> dict[str, list[tuple[np.ndarray, np.ndarray]]]:
    """For each adapter, and for `base` without any: the ids of each prompt as the engine expanded them, and the
    log-probs of all but the first, float32 [P - 1].

    A prompt has its `ids`, one placeholder an image, and the files of its `images`.
    """
    asked = {"model": str(model), "prompts": list(prompts), "adapters": {n: str(p) for n, p in adapters.items()}}
    (folder / "asked.json").write_text(json.dumps(asked))
    command = [sys.executable, __file__, str(folder / "asked.json"), str(folder / "found.json")]
    subprocess.run(command, check=True, timeout=400, env=os.environ | OURS)
    found = json.loads((folder / "found.json").read_text())
    return {
        name: [(np.array(row["ids"]), np.array(row["logprobs"], dtype=np.float32)) for row in rows]
        for name, rows in found.items()
    }


def main(asked: Path, found: Path) -> None:
    from PIL import Image
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    given = json.loads(asked.read_text())
    engine = LLM(
        model=given["model"], dtype="float32", enable_lora=True, max_lora_rank=8, max_model_len=256, max_num_seqs=4,
        enforce_eager=True, enable_prefix_caching=False, limit_mm_per_prompt={"image": 1, "video": 0},
        generation_config="vllm", kv_cache_memory_bytes=134_217_728,
    )  # fmt: skip
    inputs = [
        {
            "prompt_token_ids": prompt["ids"],
            **({"multi_modal_data": {"image": [Image.open(p) for p in prompt["images"]]}} if prompt["images"] else {}),
        }
        for prompt in given["prompts"]
    ]
    plain = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0)
    scored = {}
    for number, (name, folder) in enumerate({"base": "", **given["adapters"]}.items()):
        request = LoRARequest(name, number, folder) if folder else None
        answers = engine.generate(inputs, plain, lora_request=request, use_tqdm=False)
        scored[name] = [_row(answer) for answer in answers]
    found.write_text(json.dumps(scored))


def _row(answer: Any) -> dict[str, list]:
    ids = list(answer.prompt_token_ids)
    rows = zip(ids[1:], answer.prompt_logprobs[1:], strict=True)
    return {"ids": ids, "logprobs": [row[token].logprob for token, row in rows]}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
