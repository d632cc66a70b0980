"""Who only asks how an engine of ours is made has vLLM as it comes: benchmarks measure against that."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from mobula.actors.samplers.vllm.arguments import engine_args, sampling_params
from mobula.cluster.roles import SamplingSettings

IMPORTS = """
import sys
import benchmarks.raw.raw_vllm, mobula.actors.samplers.vllm.arguments
print(*sorted(name for name in sys.modules if name.startswith("mobula.actors.samplers.vllm")))
"""


def test_asking_for_arguments_brings_nothing_that_changes_vllm() -> None:
    found = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["mobula.actors.samplers.vllm", "mobula.actors.samplers.vllm.arguments"]


@pytest.mark.parametrize("temperature", [0.0, 0.001, 0.009, 0.01, 1.0, 2.0, 30.0])
def test_an_engine_samples_at_the_temperature_that_the_learner_divides_by(temperature: float) -> None:
    """vLLM itself raises temperatures below 0.01 and refuses those above 2."""
    engine = SimpleNamespace(chunk_tokens=16, banned_ids=(5,), stop_ids=(1,))
    params = sampling_params(engine, SamplingSettings(1, temperature, 8, seed=0))
    assert params.temperature == temperature


def test_stop_strings_may_be_special_tokens() -> None:
    engine = SimpleNamespace(chunk_tokens=16, banned_ids=(), stop_ids=(1,))
    params = sampling_params(engine, SamplingSettings(1, 1.0, 8, seed=0, stop_strings=("</answer>",)))
    assert (params.detokenize, params.skip_special_tokens) == (True, False)


@pytest.mark.parametrize(("device", "overrides"), [("cuda", {"head_dtype": "float32"}), ("cpu", {})])
def test_logits_of_an_engine_have_the_dtype_of_the_learners(device: str, overrides: dict[str, str]) -> None:
    lengths = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 64, "block_size": 16}
    media = {f"max_{kind}_per_prompt": 0 for kind in ("images", "videos", "audios")}
    settings = SimpleNamespace(
        model="model", dtype="bfloat16", device=device, seed=0, tensor_parallel=1, kv_cache_bytes=1 << 20,
        memory_fraction=0.3, memory_bytes=0, enforce_eager=True, sleep_level=0, **lengths, **media,
    )  # fmt: skip
    assert engine_args(settings).hf_overrides == overrides
