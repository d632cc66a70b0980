"""Random rows of offline jobs for the learner's tests, and configurations of the jobs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from learner_data import group, image, prompt

from mobula.actors.datasets.conversations import CHOSEN, MISMATCHED, REJECTED
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.configs.load import load_config
from mobula.configs.overrides import overridden
from mobula.configs.schema import RunConfig
from mobula.examples.digits.digits import write_digits

JOBS = {
    "sft": (),
    "dpo": (),
    "ipo": ("offline.dpo.loss=ipo",),
    "kto": (),
    "dpo_adapters": ("policy.lora.rank=4", "policy.lora.alpha=16.0", "reference.place=learner_ranks"),
    "reward_model": (),
    "reward_model_adapters": ("policy.lora.rank=4", "policy.lora.alpha=16.0"),
    "regression": ("offline.reward_model.loss=regression",),
}

SMALL = (
    "policy=tiny_qwen2_5_vl", "learner.activation_checkpointing=none", "learner=single",
    "resources.learner.num_workers=1", "offline.max_tokens=256", "offline.batch_size=16", "evaluation.num_prompts=40",
    "evaluation.interval_steps=0", "learner.warmup_steps=0", "metrics.ray=false", "metrics.tensorboard=false",
    "metrics.progress=false",
)  # fmt: skip


def offline_config(preset: str, *overrides: str) -> RunConfig:
    """A small run of `experiment=PRESET` in one process."""
    return load_config(overridden([f"experiment={preset}", *SMALL], overrides))


def config_of(folder: Path, job: str, *overrides: str) -> RunConfig:
    preset = {"ipo": "dpo", "regression": "reward_model"}.get(job, job.removesuffix("_adapters"))
    words = (f"policy.model={folder}", "data.path=x", "learner.learning_rate=0.001", *JOBS[job])
    return offline_config(preset, *words, *overrides)


def rows(tokenizer, job: str, num: int = 6, seed: int = 0) -> list[ScoredGroup]:
    """Text and images in turn; answers of several lengths, some tokens of which are not trained."""
    rng = np.random.default_rng(seed)
    made = []
    for n in range(num):
        asked = prompt(tokenizer, f"{seed}/{n}/row", [[], [image(n)], [image(n), image(n + 1, 2, 4)]][n % 3])
        answers = [
            rng.integers(0, 250, size=rng.integers(2, 9)) for _ in range(1 if job in ("sft", "regression") else 2)
        ]
        labels = [float(rng.normal())] if job == "regression" else [1.0, 0.0][: len(answers)]
        if job == "kto":  # two of three are desirable; the second answer is that of another row
            labels = [CHOSEN if n % 3 else REJECTED, MISMATCHED]
        scored = group(asked, [a.tolist() for a in answers], labels)
        trajectories = tuple(
            replace(t, action_mask=np.arange(t.num_steps) != 1, behavior_logprobs=np.zeros(t.num_steps, np.float32))
            for t in scored.group.trajectories
        )
        whole = replace(scored.group, trajectories=trajectories)
        references = [rng.normal(-5, 1, size=t.num_steps).astype(np.float32) for t in trajectories]
        made.append(
            replace(scored, group=whole, reference_logprobs=references if job in ("dpo", "ipo", "kto") else None)
        )
    return made


Rows = Callable[[str, int, np.random.Generator], dict[str, Any]]

QUESTION = "<image>Which digit is this? Answer in \\boxed{}."


def conversation(image: str, digit: int, rng: np.random.Generator) -> dict[str, Any]:
    """A row of `sft`: the digit is named."""
    return {"messages": [_asked(image), {"role": "assistant", "content": boxed(digit)}]}


def pair(image: str, digit: int, rng: np.random.Generator) -> dict[str, Any]:
    """A row of `dpo` and `reward_model`: the digit against another one."""
    other = int(digit + rng.integers(1, 10)) % 10
    return {"messages": [_asked(image)], "chosen": boxed(digit), "rejected": boxed(other)}


def form_pair(image: str, digit: int, rng: np.random.Generator) -> dict[str, Any]:
    """A pair that a small model separates soon: an answer in its box against the bare digit."""
    return {"messages": [_asked(image)], "chosen": boxed(digit), "rejected": str(digit)}


def scored(image: str, digit: int, rng: np.random.Generator) -> dict[str, Any]:
    """A row of `reward_model` with loss regression: half of the answers are boxed and have the score 1."""
    is_boxed = bool(rng.integers(2))
    answer = boxed(digit) if is_boxed else str(digit)
    return {"messages": [_asked(image), {"role": "assistant", "content": answer}], "score": float(is_boxed)}


def write_digit_rows(folder: Path, digits: Path, rows: Rows, **num_rows: int) -> Path:
    """`<split>.jsonl` with `num_rows[split]` rows each, beside copies of the digits' images."""
    write_digits(digits, task="digits")
    shutil.copytree(digits / "images", folder / "images", dirs_exist_ok=True)
    rng = np.random.default_rng(0)
    for split, num in num_rows.items():
        lines = (digits / f"{split}.jsonl").read_text().splitlines()[:num]
        found = [json.loads(line) for line in lines]
        made = [{"id": row["id"], **rows(row["image"], int(row["answer"]), rng)} for row in found]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    return folder


def boxed(digit: int) -> str:
    return rf"\boxed{{{digit}}}"


def _asked(image: str) -> dict[str, Any]:
    parts = [
        {"type": "image_url", "image_url": {"url": image}},
        {"type": "text", "text": QUESTION.removeprefix("<image>")},
    ]
    return {"role": "user", "content": parts}
