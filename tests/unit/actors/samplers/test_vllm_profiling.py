"""The images, videos and sounds that vLLM makes up to measure a GPU's memory at its start; engines on CPU skip it."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm import AsyncEngineArgs
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget

from mobula.learner.policies.tiny import TINY, write_tiny

pytestmark = [pytest.mark.families]
MULTIMODAL = [name for name in TINY if name not in ("qwen3", "qwen2.5", "llama")]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "qwen2.5-vl" else [pytest.mark.exhaustive]) for name in MULTIMODAL]
)
def test_inputs_of_the_memory_profile_can_be_made(tmp_path: Path, name: str) -> None:
    if name == "smolvlm":
        pytest.importorskip("num2words", reason="its processor needs mobula[smolvlm]")
    folder = write_tiny(name, tmp_path / name, seed=0)
    config = AsyncEngineArgs(
        model=str(folder),
        max_model_len=256,
        max_num_batched_tokens=2048,
        limit_mm_per_prompt={"image": 2, "video": 1, "audio": 1},
        mm_processor_cache_gb=0,
        mm_device_do_normalize=False,
        enforce_eager=True,
    ).create_engine_config()
    budget = MultiModalBudget(config, MULTIMODAL_REGISTRY, enable_cache=False)
    assert budget.mm_max_toks_per_item
    for modality in budget.mm_max_toks_per_item:
        assert budget.get_dummy_encoder_profile_inputs(modality)
