"""Frozen parts are in no push: an engine has them from its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engines import (
    LocalSender,
    Model,
    new_learner,
    open_model,
    perturb,
    probe_gap,
    sampled_gap,
    start_actor,
    weight_sync,
)
from fakes import pushes_of

from mobula.cluster.errors import ManifestError
from mobula.learner.learner import Learner
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EXACT = 1e-5  # nat, fp32
VISIBLE = 1e-2  # nat


@pytest.fixture
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("frozen") / "model"
    write_tiny_qwen2_5_vl(folder, seed=0)
    return open_model(folder, "policy.freeze=[vision]")


@pytest.fixture
def learner(model: Model) -> Iterator[Learner]:
    learner = new_learner(model)
    yield learner
    learner.close()


@pytest.mark.parametrize("kind", ["vllm", "huggingface"])
async def test_a_push_without_the_frozen_vision_tower_makes_the_engine_compute_what_the_learner_computes(
    kind: str, local_ray: str, model: Model, learner: Learner
) -> None:
    engine = start_actor(model, kind, 0)
    await engine.client.start()
    try:
        sync = weight_sync(engine, LocalSender(learner))
        pushes = pushes_of(sync)
        learner.version = 7
        perturb(learner, 11, only="model.")
        assert await sync.admit(engine.client) == 7, "a late joiner"
        assert await probe_gap(engine, learner) <= EXACT
        for version in (8, 9):
            perturb(learner, version, only="model.")
            assert await probe_gap(engine, learner) > VISIBLE
            assert await sync.publish(version) == version
            assert await probe_gap(engine, learner) <= EXACT
            assert await sampled_gap(engine, learner) <= EXACT
        tower = sum(t.num_bytes for t in model.prepared.checkpoint.tensors if t.name.startswith("visual."))
        assert tower > 0
        assert {push.num_bytes for push in pushes} == {model.prepared.checkpoint.num_bytes - tower}
        assert all(push.canary_gap is not None and push.canary_gap <= EXACT for push in pushes)
        with pytest.raises(ManifestError, match=r"unexpected visual\."):
            await engine.client.check_manifest(model.prepared.checkpoint)
    finally:
        await engine.close()
