"""Engines that receive changes alone have the weights of engines that received whole tensors, bit for bit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from engines import Engine, LocalSender, Model, new_learner, open_model, probe_gap, start_actor, weight_sync
from fakes import pushes_of
from one_learner import copied

from mobula.cluster.errors import ManifestError
from mobula.cluster.weight_sync.changes import PushedChanges, VersionStep
from mobula.cluster.weight_sync.tolerance import Tolerance
from mobula.cluster.weight_sync.transport import TransferGroup
from mobula.learner.learner import Learner
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_PUSHES = 12
CLOSE = Tolerance(0.1, 0.0)  # nat, in bfloat16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("delta")
    write_tiny_qwen2_5_vl(folder / "model", seed=0, tie_word_embeddings=True)
    return open_model(folder / "model", "resources.dtype=bfloat16", "weight_sync.payload=delta")


@pytest.fixture(scope="module", params=["vllm", "huggingface"])
def engine(request: pytest.FixtureRequest, local_ray: str, model: Model) -> Iterator[Engine]:
    started = start_actor(model, request.param, 0)
    asyncio.run(started.client.start())
    yield started
    asyncio.run(started.close())


@pytest.fixture
def learner(model: Model) -> Iterator[Learner]:
    learner = new_learner(model)
    yield learner
    learner.close()


def nudge(learner: Learner, seed: int, share: float, only: str = "") -> None:
    """Change a share of the elements of the weights whose checkpoint name starts with `only`."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in learner.outgoing.merged(learner.backend):
        if name.startswith(only):
            is_changed = torch.rand(tensor.shape, generator=generator) < share
            tensor.add_(is_changed * 0.05 * torch.randn(tensor.shape, generator=generator))
    learner.version += 1


async def test_after_many_pushes_of_changes_the_engine_has_the_whole_tensors(engine: Engine, learner: Learner) -> None:
    sync = weight_sync(engine, LocalSender(learner), tolerance=CLOSE)
    pushes = pushes_of(sync)
    await sync.publish(learner.version)
    for seed, (share, only) in enumerate(
        NUM_PUSHES // 4 * [(0.01, ""), (0.0, ""), (1.0, "model.layers.1"), (0.3, "visual.")]
    ):
        nudge(learner, seed, share, only)
        await sync.publish(learner.version)
    by_changes = await engine.client.prompt_logprobs(engine.model.probe)
    await engine.serve(learner, learner.version)
    np.testing.assert_array_equal(await engine.client.prompt_logprobs(engine.model.probe), by_changes)
    whole = learner.manifest().num_bytes
    assert pushes[0].num_bytes >= whole and pushes[0].changed_share == 1.0
    assert all(push.num_bytes < 0.06 * whole for push in pushes[1::4]), "of a hundredth of the elements"
    assert all(push.num_bytes < 0.02 * whole and push.changed_share == 0.0 for push in pushes[2::4])
    assert not any(push.num_resent for push in pushes)


async def test_changes_that_arrive_damaged_are_found_and_whole_tensors_follow(
    engine: Engine, learner: Learner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Damaging(LocalSender):
        async def send_weights(
            self, bucket_bytes: int, epoch: int, step: VersionStep | None = None
        ) -> PushedChanges | None:
            broadcast = TransferGroup.broadcast

            def damaged(group: TransferGroup, buffer: torch.Tensor, what: str) -> None:
                if step is not None and step.version == 2 and what.startswith("the changes of weight bucket 0"):
                    buffer = buffer.clone()
                    buffer[0] ^= 1
                broadcast(group, buffer, what)

            with monkeypatch.context() as patch:
                patch.setattr(TransferGroup, "broadcast", damaged)
                return await super().send_weights(bucket_bytes, epoch, step)

    sync = weight_sync(engine, Damaging(learner), tolerance=CLOSE, max_attempts=2)
    pushes = pushes_of(sync)
    learner.version = 1
    await sync.publish(1)
    for seed in (2, 3):
        nudge(learner, seed, share=0.01)
        with caplog.at_level(logging.WARNING):
            await sync.publish(seed)
    assert "tensors differ from the learner's after its changes were applied" in caplog.text
    assert [push.num_resent for push in pushes] == [0, 1, 0]
    assert pushes[2].num_bytes < 0.06 * learner.manifest().num_bytes
    assert await probe_gap(engine, learner) <= CLOSE.nat


async def test_an_engine_refuses_changes_since_a_version_that_it_does_not_have_and_another_payload(
    engine: Engine, learner: Learner, caplog: pytest.LogCaptureFixture
) -> None:
    await engine.serve(learner, version=3)
    other = new_learner(engine.model, "resources.dtype=bfloat16")
    try:
        assert copied(other).keys() == copied(learner).keys()
        with pytest.raises(ManifestError, match="payload weights, and the engine was started for delta"):
            await weight_sync(engine, LocalSender(other)).publish(1)
    finally:
        other.close()
    sync = weight_sync(engine, LocalSender(learner), tolerance=CLOSE, max_attempts=2)
    learner.version = 4
    await sync.publish(4)
    sync._held[engine.client] = sync._base_version = 3  # as if the engine had been replaced unnoticed
    nudge(learner, 5, share=0.01)
    with caplog.at_level(logging.WARNING):
        await sync.publish(5)
    assert "changes since version 3, and this engine has version 4: it needs whole tensors" in caplog.text
    assert await probe_gap(engine, learner) <= CLOSE.nat
