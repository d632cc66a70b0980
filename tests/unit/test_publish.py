"""The order of a push, what it refuses, and what it says about those who failed; sender and receivers are fakes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import numpy as np
import pytest
from fakes import make_prompt

from cluster.errors import CanaryError, DeadlineError, ManifestError, WeightSyncError
from cluster.trajectory import Prompt
from cluster.weight_sync.manifest import Manifest, TensorSpec
from cluster.weight_sync.publish import Push, WeightSync
from cluster.weight_sync.transport import Rendezvous

MANIFEST = Manifest((TensorSpec("w", (2,), "float32"),))
PROBE = make_prompt("0/0/probe")


class FakeSender:
    """A learner whose weights are one number; `events` is what happened, in order, with the receivers' share."""

    def __init__(self, weight: float = 1.0, manifest: Manifest = MANIFEST) -> None:
        self.weight = weight
        self.events: list[str] = []
        self._manifest = manifest

    async def manifest(self) -> Manifest:
        return self._manifest

    async def open_transfer(self, epoch: int, num_receivers: int) -> Rendezvous:
        self.events.append(f"open epoch {epoch} for {num_receivers}")
        return Rendezvous("host", 1, epoch, 1 + num_receivers, "gloo", 5.0)

    async def join_transfer(self, rendezvous: Rendezvous) -> None:
        self.events.append("sender joins")

    async def send_weights(self, bucket_bytes: int) -> None:
        self.events.append("send")

    async def export_weights(self, bucket_bytes: int) -> list[np.ndarray]:
        return [np.array([self.weight])]

    async def sequence_logprobs(self, prompt: Prompt) -> np.ndarray:
        assert prompt is PROBE
        return np.full(3, -self.weight)


class FakeReceiver:
    """An engine that ends up with the sender's weight plus `error`, and stamps the version plus `version_error`."""

    def __init__(self, name: str, sender: FakeSender, *, error: float = 0.0, version_error: int = 0) -> None:
        self.name = name
        self.version = -1
        self.weight = math.nan
        self.ranks: list[tuple[int, int]] = []
        self.was_cancelled = False
        self._sender = sender
        self._error = error
        self._version_error = version_error

    async def check_manifest(self, manifest: Manifest) -> None:
        manifest.check_against(MANIFEST)

    async def join_transfer(self, rendezvous: Rendezvous, rank: int) -> None:
        self.ranks.append((rendezvous.epoch, rank))

    async def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> None:
        self._take(self._sender.weight, version)

    async def load_weights(self, manifest: Manifest, bucket_bytes: int, buckets: Sequence[np.ndarray], version: int) -> None:
        self._take(float(buckets[0][0]), version)

    async def weight_version(self) -> int:
        return self.version

    async def prompt_logprobs(self, prompt: Prompt) -> np.ndarray:
        return np.full(3, -self.weight)

    def _take(self, weight: float, version: int) -> None:
        self.weight, self.version = weight + self._error, version + self._version_error


def weight_sync(sender: FakeSender, *receivers: FakeReceiver, canary_interval: int = 1) -> WeightSync:
    return WeightSync(
        sender, receivers, bucket_bytes=64, canary_interval=canary_interval, canary_tolerance=1e-3, probe=PROBE
    )


async def test_a_push_brings_every_receiver_to_the_version_and_says_what_it_took() -> None:
    sender = FakeSender()
    receivers = [FakeReceiver(f"rollout/{n}", sender) for n in range(3)]
    sync, pushes = weight_sync(sender, *receivers), []

    async def listen(push: Push) -> None:
        pushes.append(push)

    sync.on_published(listen)
    assert await sync.publish(4) == 4
    assert [receiver.version for receiver in receivers] == [4, 4, 4]
    [push] = pushes
    assert (push.version, push.num_bytes, push.canary_gap) == (4, MANIFEST.num_bytes, 0.0)
    assert push.seconds >= 0


async def test_the_group_meets_once_for_many_pushes_and_ranks_follow_the_sender() -> None:
    sender = FakeSender()
    receivers = [FakeReceiver(f"rollout/{n}", sender) for n in range(2)]
    sync = weight_sync(sender, *receivers)
    for version in range(3):
        await sync.publish(version)
    assert sender.events == ["open epoch 1 for 2", "sender joins", "send", "send", "send"]
    assert [receiver.ranks for receiver in receivers] == [[(1, 1)], [(1, 2)]]
    assert sync.num_pushes == 3


async def test_a_late_joiner_is_served_from_the_store_and_the_next_push_meets_anew() -> None:
    sender = FakeSender()
    first, late = FakeReceiver("rollout/0", sender), FakeReceiver("rollout/1", sender)
    sync = weight_sync(sender, first)
    await sync.publish(1)
    await sync.admit(late, 1)
    assert (late.version, late.weight, late.ranks) == (1, sender.weight, [])
    await sync.publish(2)
    assert (first.ranks, late.ranks) == ([(1, 1), (2, 1)], [(2, 2)])


async def test_a_manifest_that_does_not_fit_ends_the_push_before_anybody_meets() -> None:
    sender = FakeSender(manifest=Manifest((TensorSpec("other", (2,), "float32"),)))
    receiver = FakeReceiver("rollout/0", sender)
    with pytest.raises(ManifestError, match="missing w; unexpected other"):
        await weight_sync(sender, receiver).publish(1)
    with pytest.raises(ManifestError, match="missing w"):
        await weight_sync(sender).admit(receiver, 1)
    assert (sender.events, receiver.version) == ([], -1)


async def test_a_receiver_at_another_version_is_named() -> None:
    sender = FakeSender()
    good, wrong = FakeReceiver("rollout/0", sender), FakeReceiver("rollout/1", sender, version_error=-1)
    with pytest.raises(WeightSyncError, match=r"after the push of version 3: rollout/1 is at 2$"):
        await weight_sync(sender, good, wrong).publish(3)


@pytest.mark.parametrize("error", [0.5, -0.5, math.nan, math.inf])
async def test_the_canary_names_an_engine_that_computes_something_else(error: float) -> None:
    sender = FakeSender()
    good, wrong = FakeReceiver("rollout/0", sender), FakeReceiver("rollout/1", sender, error=error)
    with pytest.raises(CanaryError, match=r"differ from the learner's: rollout/1 by .*canary_tolerance=0\.001"):
        await weight_sync(sender, good, wrong).publish(1)


async def test_the_canary_keeps_its_interval() -> None:
    sender, gaps = FakeSender(), []
    sync = weight_sync(sender, FakeReceiver("rollout/0", sender, error=1e-4), canary_interval=3)

    async def listen(push: Push) -> None:
        gaps.append(push.canary_gap)

    sync.on_published(listen)
    for version in range(5):
        await sync.publish(version)
    assert [gap is not None for gap in gaps] == [True, False, False, True, False]
    assert gaps[0] == pytest.approx(1e-4)


async def test_interval_0_switches_the_canary_off() -> None:
    sender = FakeSender()
    sync = weight_sync(sender, FakeReceiver("rollout/0", sender, error=9.0), canary_interval=0)
    assert await sync.publish(1) == 1


async def test_the_first_failure_ends_the_wait_for_all_and_travels_as_itself() -> None:
    class Silent(FakeReceiver):
        async def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                self.was_cancelled = True

    class Broken(FakeReceiver):
        async def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> None:
            raise DeadlineError("waited 5 s for rollout/1")

    sender = FakeSender()
    silent, broken = Silent("rollout/0", sender), Broken("rollout/1", sender)
    sync, heard = weight_sync(sender, silent, broken), []

    async def listen(push: Push) -> None:
        heard.append(push)

    sync.on_published(listen)
    async with asyncio.timeout(5):
        with pytest.raises(DeadlineError, match="waited 5 s for rollout/1"):
            await sync.publish(1)
    assert silent.was_cancelled
    assert (heard, sync.num_pushes) == ([], 0)
