"""A tensor that did not arrive, or that an engine did not load, is found whatever its size and dtype."""

from __future__ import annotations

import logging

import pytest
from engines import Engine, LocalSender, Stale, StaleOnTheWay, perturb, probe_gap, weight_sync
from one_learner import copied

from mobula.cluster.errors import WeightSyncError
from mobula.learner.learner import Learner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CLOSE = {"float32": 1e-5, "bfloat16": 0.1}  # nat, largest; the perturbed weights differ by more
MATRIX, BIAS = "model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.k_proj.bias"


@pytest.fixture(params=["vllm-untied", "vllm-bfloat16", "huggingface"])
def engine_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("name", [MATRIX, BIAS])
async def test_a_row_that_arrives_stale_is_found_and_the_engine_is_given_the_weights_again(
    engine: Engine, learner: Learner, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = copied(learner)
    perturb(learner, seed=31, scale=1e-3)
    sender = StaleOnTheWay(learner, Stale(name, 1, before[name]), monkeypatch)
    with caplog.at_level(logging.WARNING):
        await weight_sync(engine, sender, canary_interval=0).publish(1)
    assert "version 1 did not arrive" in caplog.text
    assert "weight buckets did not arrive as they were sent" in caplog.text
    assert await probe_gap(engine, learner) <= CLOSE[engine.model.config.resources.dtype]
    caplog.clear()
    perturb(learner, seed=32, scale=1e-3)
    await weight_sync(engine, LocalSender(learner), canary_interval=0).publish(2)
    assert "did not arrive" not in caplog.text


@pytest.mark.parametrize("engine_name", ["vllm-untied", "vllm-bfloat16"])
@pytest.mark.parametrize(
    ("name", "layer"),
    [
        (BIAS, "language_model.model.layers.1.self_attn.qkv_proj"),  # one of three that share a parameter
        ("model.layers.1.post_attention_layernorm.weight", "language_model.model.layers.1.post_attention_layernorm"),
    ],
)
async def test_a_tensor_that_the_engine_does_not_load_is_found_and_the_next_push_is_whole(
    engine: Engine, learner: Learner, name: str, layer: str
) -> None:
    assert name in {spec.name for spec in learner.manifest().tensors}
    perturb(learner, seed=41)
    await engine.handle.skip.remote(name)
    try:
        with pytest.raises(WeightSyncError, match=rf"not all tensors for 1 layers of the engine \({layer}\)"):
            await weight_sync(engine, LocalSender(learner), canary_interval=0).publish(1)
    finally:
        await engine.handle.skip.remote("")
    perturb(learner, seed=42)
    await weight_sync(engine, LocalSender(learner), canary_interval=0).publish(2)
    assert await probe_gap(engine, learner) <= CLOSE[engine.model.config.resources.dtype]
