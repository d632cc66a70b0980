"""Which tensors a push of weights carries."""

from __future__ import annotations

from pathlib import Path

import pytest
from learner_data import tiny_config

from mobula.cluster.weight_sync.manifest import Manifest, TensorSpec
from mobula.learner.policies.checkpoint.stored import pushed_manifest
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

NAMES = (
    "visual.blocks.0.attn.qkv.weight",
    "visual.merger.mlp.0.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.mlp.gate.weight",
    "model.layers.0.mlp.experts.0.up_proj.weight",
    "model.layers.0.mlp.experts.1.up_proj.weight",
    "model.norm.weight",
)


@pytest.mark.parametrize(
    ("freeze", "left_out"),
    [
        ("", ()),
        ("vision", NAMES[:2]),
        ("visual.merger.", NAMES[1:2]),
        ("model.layers.0.self_attn.q_proj", ()),  # one layer of vLLM together with k_proj
        ("model.layers.0.mlp.experts.1.", ()),
        ("model.layers.0.mlp.experts.", NAMES[5:7]),
    ],
)
def test_frozen_tensors_are_not_sent_except_those_that_vllm_loads_with_trained_ones(
    freeze: str, left_out: tuple[str, ...], tmp_path: Path
) -> None:
    write_tiny_qwen2_5_vl(tmp_path / "model", seed=0)
    whole = Manifest(tuple(TensorSpec(name, (4, 4), "float32") for name in NAMES))
    config = tiny_config(tmp_path / "model", f"policy.freeze=[{freeze}]")
    pushed = pushed_manifest(whole, config)
    assert [spec.name for spec in pushed.tensors] == [name for name in NAMES if name not in left_out]
    discards = {"colocated": True, "sleep_level": 2}
    asleep = config.model_copy(update={"resources": config.resources.model_copy(update=discards)})
    assert pushed_manifest(whole, asleep) == whole
