"""The order of a push, what it refuses, and the failures that it reports; sender and receivers are fakes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fakes import FixedMembers, make_prompt, pushes_of

from mobula.cluster.errors import (
    CanaryError,
    DeadlineError,
    ManifestError,
    RolloutError,
    WeightSyncError,
    WorkerDiedError,
)
from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.weight_sync.changes import PushedChanges, VersionStep
from mobula.cluster.weight_sync.manifest import Manifest, TensorSpec
from mobula.cluster.weight_sync.tolerance import MeasuredRounding, Tolerance, num_copies
from mobula.cluster.weight_sync.transport import Rendezvous
from mobula.cluster.weight_sync.weight_sync import WeightSync

MANIFEST = Manifest((TensorSpec("w", (2,), "float32"),))
PROBE = make_prompt("0/0/probe")
EXACT = Tolerance(1e-3, 0.0)


class FakeSender:
    """A learner whose weights are one number; `events` is what happened, in order, with the receivers' share."""

    def __init__(self, weight: float = 1.0, manifest: Manifest = MANIFEST) -> None:
        self.weight = weight
        self.version = 1
        self.events: list[str] = []
        self.exports: list[int] = []
        self.steps: list[VersionStep | None] = []
        self._manifest = manifest

    async def manifest(self) -> Manifest:
        return self._manifest

    async def open_transfer(self, epoch: int, num_receivers: int) -> Rendezvous:
        self.events.append(f"open epoch {epoch} for {num_receivers}")
        return Rendezvous("host", 1, epoch, 1 + num_receivers, "gloo", 5.0)

    async def join_transfer(self, rendezvous: Rendezvous) -> None:
        self.events.append("sender joins")

    async def leave_transfer(self, epoch: int) -> None:
        self.events.append(f"leave {epoch}")

    async def send_weights(self, bucket_bytes: int, epoch: int, step: VersionStep | None) -> PushedChanges | None:
        self.events.append(f"send {epoch}")
        self.steps.append(step)
        return step and PushedChanges(num_bytes=3, num_changed=1)

    async def export_weights(self, bucket_bytes: int) -> tuple[int, list[np.ndarray]]:
        self.exports.append(self.version)
        return self.version, [np.array([self.weight])]

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
        self._sender = sender
        self._error = error
        self._version_error = version_error

    async def check_manifest(self, manifest: Manifest) -> None:
        manifest.check_against(replace(MANIFEST, payload=self._sender._manifest.payload))

    async def join_transfer(self, rendezvous: Rendezvous, rank: int) -> None:
        self.ranks.append((rendezvous.epoch, rank))

    async def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> int:
        self._take(self._sender.weight, version)
        return self.version

    async def load_weights(
        self, manifest: Manifest, bucket_bytes: int, buckets: Sequence[np.ndarray], version: int
    ) -> None:
        self._take(float(buckets[0][0]), version)

    async def weight_version(self) -> int:
        return self.version

    async def prompt_logprobs(self, prompt: Prompt) -> np.ndarray:
        return np.full(3, -self.weight)

    def _take(self, weight: float, version: int) -> None:
        self.weight, self.version = weight + self._error, version + self._version_error


def sync_of(sender: FakeSender, *receivers: FakeReceiver, **changes: Any) -> tuple[WeightSync, FixedMembers]:
    """A push without waves, with a canary each time; and its members."""
    least = {"canary_interval": 1, "canary_tolerance": EXACT, "wave_size": 0, "ranks_of_receiver": 1}
    members = FixedMembers(*receivers)
    return WeightSync(sender, members, bucket_bytes=64, max_attempts=3, probe=PROBE, **{**least, **changes}), members


def weight_sync(sender: FakeSender, *receivers: FakeReceiver, **changes: Any) -> WeightSync:
    return sync_of(sender, *receivers, **changes)[0]


def bench(
    num: int, kind: type[FakeReceiver] = FakeReceiver, manifest: Manifest = MANIFEST, **options: Any
) -> tuple[FakeSender, list[Any], WeightSync]:
    """A sender, its receivers and their push."""
    sender = FakeSender(manifest=manifest)
    receivers = [kind(f"rollout/{n}", sender) for n in range(num)]
    return sender, receivers, weight_sync(sender, *receivers, **options)


async def test_a_push_brings_every_receiver_to_the_version_and_reports_what_it_took() -> None:
    sender, receivers, sync = bench(3)
    pushes = pushes_of(sync)
    assert await sync.publish(4) == 4
    assert [receiver.version for receiver in receivers] == [4, 4, 4]
    [push] = pushes
    assert (push.version, push.num_bytes, push.canary_gap) == (4, MANIFEST.num_bytes, 0.0)
    assert push.seconds >= 0


async def test_who_listens_for_arrivals_is_called_before_the_canary_finds_a_difference() -> None:
    sender, arrived = FakeSender(), []
    receiver = FakeReceiver("rollout/0", sender, error=0.5)
    sync = weight_sync(sender, receiver)

    async def listen(version: int) -> None:
        arrived.append((version, receiver.version))

    sync.on_arrived.append(listen)
    with pytest.raises(CanaryError):
        await sync.publish(3)
    assert arrived == [(3, 3)]


async def test_a_push_is_announced_once_while_its_receivers_are_at_it() -> None:
    class Patient(FakeReceiver):
        """Receives once the push is announced."""

        async def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> int:
            while not announced or announced[-1] < version:
                await asyncio.sleep(0)
            return await super().receive_weights(manifest, bucket_bytes, version)

    sender, announced = FakeSender(), []
    sync, members = sync_of(sender, Patient("rollout/0", sender), Patient("rollout/1", sender), wave_size=1)
    sync.on_announced.append(announced.append)
    async with asyncio.timeout(5):
        for version in range(2):
            await sync.publish(version)
    assert announced == members.versions_announced == [0, 1]


async def test_the_group_meets_once_for_many_pushes_and_ranks_follow_the_sender() -> None:
    sender, receivers, sync = bench(2)
    for version in range(3):
        await sync.publish(version)
    assert sender.events == ["open epoch 1 for 2", "sender joins", "send 1", "send 1", "send 1"]
    assert [receiver.ranks for receiver in receivers] == [[(1, 1)], [(1, 2)]]
    assert sync.num_pushes == 3


async def test_a_late_joiner_is_served_from_the_store_and_the_next_push_forms_a_new_group() -> None:
    sender = FakeSender()
    first, late = FakeReceiver("rollout/0", sender), FakeReceiver("rollout/1", sender)
    sync, members = sync_of(sender, first)
    await sync.publish(1)
    assert await sync.admit(late) == 1
    assert (late.version, late.weight, late.ranks) == (1, sender.weight, [])
    members.add(late)
    await sync.publish(2)
    assert (first.ranks, late.ranks) == ([(1, 1), (2, 1)], [(2, 2)])
    assert "leave 1" in sender.events


async def test_a_manifest_that_does_not_fit_ends_the_push_before_a_group_is_formed() -> None:
    sender = FakeSender(manifest=Manifest((TensorSpec("other", (2,), "float32"),)))
    receiver = FakeReceiver("rollout/0", sender)
    with pytest.raises(ManifestError, match="missing w; unexpected other"):
        await weight_sync(sender, receiver).publish(1)
    with pytest.raises(ManifestError, match="missing w"):
        await weight_sync(sender).admit(receiver)
    assert (sender.events, receiver.version) == ([], -1)


async def test_a_receiver_that_stays_at_another_version_is_named() -> None:
    sender = FakeSender()
    good, wrong = FakeReceiver("rollout/0", sender), FakeReceiver("rollout/1", sender, version_error=-1)
    sender.version = 3
    refusal = r"version 3 did not reach rollout/1 in 3 attempts .*: rollout/1 was given version 3 and is at 2$"
    with pytest.raises(WeightSyncError, match=refusal):
        await weight_sync(sender, good, wrong).publish(3)
    assert (good.version, len(sender.exports)) == (3, 3)


@pytest.mark.parametrize("error", [0.5, -0.5, math.nan, math.inf])
async def test_an_engine_that_computes_something_else_is_lost_and_named(error: float) -> None:
    sender = FakeSender()
    sync, members = sync_of(sender, FakeReceiver("rollout/0", sender), FakeReceiver("rollout/1", sender, error=error))
    await sync.publish(1)
    [(name, lost)] = members.lost.items()
    assert name == "rollout/1" and isinstance(lost, CanaryError)
    assert "rollout/1 by" in str(lost) and "canary_tolerance=0.001" in str(lost)


async def test_if_every_engine_computes_something_else_the_push_is_at_fault() -> None:
    sender = FakeSender()
    wrong = [FakeReceiver(f"rollout/{n}", sender, error=0.5) for n in range(2)]
    off = r"rollout/0 by 0.5 nat in the mean, 0.5 at most, rollout/1 by 0.5 .*engine and learner compute otherwise"
    with pytest.raises(CanaryError, match=off):
        await weight_sync(sender, *wrong).publish(1)


async def test_the_canary_keeps_its_interval() -> None:
    sender = FakeSender()
    sync = weight_sync(sender, FakeReceiver("rollout/0", sender, error=1e-4), canary_interval=3)
    pushes = pushes_of(sync)
    for version in range(5):
        sender.weight += version
        await sync.publish(version)
    assert [push.canary_gap is not None for push in pushes] == [True, True, False, True, False]
    assert pushes[0].canary_gap == pytest.approx(1e-4)


async def test_the_canary_runs_at_every_push_until_weights_have_changed() -> None:
    """A head that the push leaves at its old value is right until there is a change, which may come after some steps
    without a gradient."""
    sender, _, sync = bench(1, canary_interval=100)
    pushes = pushes_of(sync)
    for version, weight in enumerate((1.0, 1.0, 1.0, 2.0, 3.0)):
        sender.weight = weight
        await sync.publish(version)
    assert [push.canary_gap for push in pushes] == [0.0, 0.0, 0.0, 0.0, None]


async def test_a_tensor_that_stays_old_is_found_at_the_first_push_of_changed_weights() -> None:
    sender, [stale], sync = bench(1, canary_interval=100)
    await sync.publish(0)
    await sync.publish(1)
    stale._take = lambda weight, version: setattr(stale, "version", version)  # type: ignore[method-assign]
    sender.weight = 1.5
    with pytest.raises(CanaryError, match=r"rollout/0 by 0.5"):
        await sync.publish(2)


class RoundingSender(FakeSender):
    """A learner whose log-probs a batch of several rows changes by 0.06 nat."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []

    async def sequence_logprobs(self, prompt: Prompt, num_copies: int = 1) -> np.ndarray:
        self.batches.append(num_copies)
        return await super().sequence_logprobs(prompt) + (0.06 if num_copies > 1 else 0.0)


@pytest.mark.parametrize("canary_interval", [0, 1])
async def test_rounding_is_measured_once_at_the_first_push_and_engines_may_differ_by_it(canary_interval: int) -> None:
    sender = RoundingSender()
    engine, rounding = FakeReceiver("rollout/0", sender, error=0.59), MeasuredRounding()
    sync = weight_sync(sender, engine, canary_interval=canary_interval, canary_tolerance=Tolerance(0.3, 0.4, rounding))
    for version in (1, 2):
        await sync.publish(version)
    assert rounding.widened(0.3) == pytest.approx(0.6)
    assert sender.batches[:2] == [1, num_copies(PROBE)] and set(sender.batches[2:]) <= {1}
    if canary_interval:
        sender.weight, engine._error = 2.0, 0.61
        with pytest.raises(CanaryError, match=r"canary_tolerance=0\.3, widened to 0\.6 by the rounding of the model"):
            await sync.publish(3)


async def test_interval_0_switches_the_canary_off() -> None:
    sender = FakeSender()
    sync = weight_sync(sender, FakeReceiver("rollout/0", sender, error=9.0), canary_interval=0)
    assert await sync.publish(1) == 1


class BreakingSender(FakeSender):
    """Sees its next broadcast break."""

    breaks = True

    async def send_weights(self, bucket_bytes: int, epoch: int, step: VersionStep | None) -> PushedChanges | None:
        sent = await super().send_weights(bucket_bytes, epoch, step)
        if self.breaks:
            self.breaks = False
            raise WeightSyncError("connection closed by peer")
        return sent


CUT_OFF = WeightSyncError("connection closed by peer")


class Mortal(FakeReceiver):
    """Fails its next `num_failures` receptions with `error`."""

    num_failures = 1

    def __init__(self, name: str, sender: FakeSender, error: Exception) -> None:
        super().__init__(name, sender)
        self.failure = error

    async def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> int:
        if self.num_failures:
            self.num_failures -= 1
            raise self.failure
        return await super().receive_weights(manifest, bucket_bytes, version)


@pytest.mark.parametrize(
    "error",
    [WorkerDiedError("rollout/1 died"), DeadlineError("waited 5 s for rollout/1"), RolloutError("the engine is dead")],
)
async def test_a_receiver_that_dies_in_the_middle_ends_in_a_new_epoch_of_the_living(error: Exception) -> None:
    """The broadcast breaks with it; the others get the version in epoch 2."""
    sender = BreakingSender()
    living = Mortal("rollout/0", sender, CUT_OFF)
    sync, members = sync_of(sender, living, Mortal("rollout/1", sender, error), FakeReceiver("rollout/2", sender))
    pushes = pushes_of(sync)
    assert await sync.publish(1) == 1
    assert members.lost == {"rollout/1": error}
    assert members.versions == {"rollout/0": 1, "rollout/2": 1}
    assert sender.events == [
        "open epoch 1 for 3", "sender joins", "send 1", "leave 1", "open epoch 2 for 1", "sender joins", "send 2",
    ]  # fmt: skip
    assert pushes[0].num_lost == 1 and not sender.exports
    await sync.publish(2)
    assert members.versions == {"rollout/0": 2, "rollout/2": 2}


async def test_a_receiver_cut_off_from_a_sender_that_has_sent_all_is_given_what_the_learner_has_now() -> None:
    """Its peer died as the last bytes were on their way through it; the learner has made another version since."""
    sender = FakeSender()
    cut_off, dying = Mortal("rollout/0", sender, CUT_OFF), Mortal("rollout/1", sender, WorkerDiedError("gone"))
    sync, members = sync_of(sender, cut_off, dying, FakeReceiver("rollout/2", sender))
    sender.version, sender.weight = 2, 7.0
    await sync.publish(1)
    assert members.versions == {"rollout/0": 2, "rollout/2": 1}
    assert (cut_off.version, cut_off.weight, sender.exports) == (2, 7.0, [2])
    await sync.publish(2)
    assert members.versions == {"rollout/0": 2, "rollout/2": 2}
    assert sender.events == [
        "open epoch 1 for 3", "sender joins", "send 1", "leave 1", "open epoch 2 for 2", "sender joins", "send 2",
    ]  # fmt: skip


class Slow(FakeReceiver):
    """Loads what it has received once `may_load` is set."""

    def __init__(self, name: str, sender: FakeSender) -> None:
        super().__init__(name, sender)
        self.may_load = asyncio.Event()

    async def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> int:
        weight = self._sender.weight
        await self.may_load.wait()
        self._take(weight, version)
        return version


async def test_a_cancelled_call_of_a_receiver_is_no_reason_to_send_again() -> None:
    class Cancelled(FakeReceiver):
        async def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> int:
            raise asyncio.CancelledError

    sender = FakeSender()
    with pytest.raises(asyncio.CancelledError):
        await weight_sync(sender, Cancelled("rollout/0", sender)).publish(1)
    assert sender.exports == []


async def test_the_learner_goes_on_once_all_is_sent_and_the_next_push_waits_for_who_still_loads() -> None:
    sender = FakeSender()
    slow = Slow("rollout/0", sender)
    sync, members = sync_of(sender, slow, FakeReceiver("rollout/1", sender), canary_interval=0)
    pushes = pushes_of(sync)
    async with asyncio.timeout(5), sync.settling():
        assert await sync.publish(1) == 1
        assert (members.versions, members.version, pushes) == ({"rollout/1": 1}, -1, [])
        sender.weight = 2.0  # the next update
        following = asyncio.create_task(sync.publish(2))
        await asyncio.sleep(0.01)
        assert sender.events.count("send 1") == 1, "it waits"
        slow.may_load.set()
        await following
        assert pushes[0].version == 1
        await sync.settled()
        assert (members.versions, members.version) == ({"rollout/0": 2, "rollout/1": 2}, 2)
        assert [push.version for push in pushes] == [1, 2]
    assert (slow.weight, sender.events.count("send 1")) == (2.0, 2)


async def test_the_run_does_not_end_before_its_last_push() -> None:
    _, [slow], sync = bench(1, Slow, canary_interval=0)
    asyncio.get_running_loop().call_later(0.02, slow.may_load.set)
    async with asyncio.timeout(5), sync.settling():
        await sync.publish(1)
        assert slow.version == -1
    assert slow.version == 1


async def test_outside_settling_a_push_is_waited_for() -> None:
    _, [slow], sync = bench(1, Slow)
    async with asyncio.timeout(5):
        asyncio.get_running_loop().call_later(0.02, slow.may_load.set)
        await sync.publish(1)
    assert slow.version == 1


@pytest.mark.parametrize("error", [0.0, 0.5])
async def test_the_canary_compares_with_what_was_sent_while_the_learner_is_further(error: float) -> None:
    sender = FakeSender()
    slow = Slow("rollout/0", sender)
    wrong = FakeReceiver("rollout/1", sender, error=error)
    cut_off = Mortal("rollout/2", sender, CUT_OFF)
    sync, members = sync_of(sender, slow, wrong, cut_off)
    pushes = pushes_of(sync)
    async with asyncio.timeout(5), sync.settling():
        await sync.publish(1)
        sender.version, sender.weight = 2, 7.0  # the next update; who was cut off gets this
        late = FakeReceiver("rollout/3", sender)
        await sync.admit(late)
        members.add(late)
        assert not pushes, "the learner did not wait for it"
        slow.may_load.set()
        await sync.settled()
    assert [push.canary_gap for push in pushes] == [0.0]
    assert list(members.lost) == (["rollout/1"] if error else [])
    assert (cut_off.weight, late.weight) == (7.0, 7.0), "they are right, and not asked"


async def test_a_canary_that_no_engine_survives_ends_the_body_that_went_on_without_it() -> None:
    sender = FakeSender()
    sync = weight_sync(sender, FakeReceiver("rollout/0", sender, error=0.5))
    with pytest.raises(CanaryError, match=r"rollout/0 by 0.5"):
        async with asyncio.timeout(5), sync.settling():
            await sync.publish(1)
            await asyncio.Event().wait()


async def test_a_wave_is_sent_to_once_the_one_before_it_has_loaded() -> None:
    sender, [slow, last], sync = bench(2, Slow, wave_size=1, canary_interval=0)
    async with asyncio.timeout(5), sync.settling():
        push = asyncio.create_task(sync.publish(1))
        await asyncio.sleep(0.01)
        assert "send 2" not in sender.events
        slow.may_load.set()
        await push
        assert "send 2" in sender.events and last.version == -1
        last.may_load.set()


async def test_the_last_receiver_may_die_too() -> None:
    sender = FakeSender()
    sync, members = sync_of(sender, Mortal("rollout/0", sender, WorkerDiedError("gone")))
    assert await sync.publish(1) == 1
    assert (members.version, list(members.lost)) == (1, ["rollout/0"])


async def test_waves_are_updated_one_after_the_other_in_groups_of_their_own() -> None:
    sender, receivers, sync = bench(5, wave_size=2)
    for version in (1, 2):
        await sync.publish(version)
    assert [r.ranks for r in receivers] == [[(1, 1)], [(1, 2)], [(2, 1)], [(2, 2)], [(3, 1)]]
    assert [event for event in sender.events if "send" in event and "joins" not in event] == [
        "send 1", "send 2", "send 3", "send 1", "send 2", "send 3",
    ]  # fmt: skip


async def test_a_wave_that_loses_a_member_leaves_the_others_alone() -> None:
    sender = FakeSender()
    good = [FakeReceiver(f"rollout/{n}", sender) for n in (0, 1, 3)]
    dying = Mortal("rollout/2", sender, WorkerDiedError("gone"))
    sync, members = sync_of(sender, *good[:2], dying, good[2], wave_size=2)
    await sync.publish(1)
    assert members.versions == {"rollout/0": 1, "rollout/1": 1, "rollout/3": 1}
    assert good[0].ranks == [(1, 1)]
    await sync.publish(2)
    assert good[0].ranks == [(1, 1)], "its group is as it was"
    assert good[2].ranks[-1] == (3, 1)


async def test_a_group_that_does_not_come_together_is_tried_again() -> None:
    class Late(FakeReceiver):
        async def join_transfer(self, rendezvous: Rendezvous, rank: int) -> None:
            if rendezvous.epoch == 1:
                raise WeightSyncError("could not join transfer epoch 1")
            await super().join_transfer(rendezvous, rank)

    sender = FakeSender()
    late = Late("rollout/0", sender)
    assert await weight_sync(sender, late).publish(1) == 1
    assert late.ranks == [(2, 1)]


async def test_a_sender_that_is_gone_ends_the_push_as_itself() -> None:
    class Gone(FakeSender):
        async def send_weights(self, bucket_bytes: int, epoch: int, step: VersionStep | None = None) -> None:
            raise WorkerDiedError("learner/0 died")

    sender = Gone()
    sync, members = sync_of(sender, FakeReceiver("rollout/0", sender))
    with pytest.raises(WorkerDiedError, match="learner/0 died"):
        await sync.publish(1)
    assert members.version == -1


async def test_an_engine_over_several_gpus_takes_that_many_ranks_of_the_group() -> None:
    sender, receivers, sync = bench(3, ranks_of_receiver=4)
    await sync.publish(1)
    assert sender.events[0] == "open epoch 1 for 12"
    assert [receiver.ranks for receiver in receivers] == [[(1, 1)], [(1, 5)], [(1, 9)]]


DELTA = replace(MANIFEST, payload="delta")


class DeltaReceiver(FakeReceiver):
    """Notes the base version of each push."""

    def __init__(self, name: str, sender: FakeSender) -> None:
        super().__init__(name, sender)
        self.bases: list[int | None] = []
        self.fails = False

    async def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> int:
        self.bases.append(manifest.base_version)
        if self.fails:
            raise WeightSyncError("1 tensors differ from the learner's")
        return await super().receive_weights(manifest, bucket_bytes, version)


async def test_changes_are_sent_since_the_version_that_every_receiver_of_the_wave_holds() -> None:
    sender = FakeSender(manifest=DELTA)
    first, late = DeltaReceiver("rollout/0", sender), DeltaReceiver("rollout/1", sender)
    sync, members = sync_of(sender, first)
    pushes = pushes_of(sync)
    for version in (1, 2):
        await sync.publish(version)
    assert (pushes[1].num_bytes, pushes[1].changed_share) == (3, 0.5)
    sender.version = 2
    await sync.admit(late)  # at the version of the last push
    members.add(late)
    await sync.publish(3)
    members.add(another := DeltaReceiver("rollout/2", sender))
    await sync.admit(another)  # at version 2
    for version in (4, 5):
        await sync.publish(version)
    assert first.bases == [None, 1, 2, None, 4]
    assert (late.bases, another.bases) == ([2, None, 4], [None, 4])
    assert sender.steps == [VersionStep(n, base, is_last=True) for n, base in enumerate(first.bases, start=1)]


async def test_a_receiver_that_differs_after_changes_is_given_whole_tensors_and_counted() -> None:
    sender, receivers, sync = bench(2, DeltaReceiver, DELTA)
    pushes = pushes_of(sync)
    await sync.publish(1)
    receivers[1].fails, sender.version = True, 2
    await sync.publish(2)
    receivers[1].fails, sender.version = False, 3
    await sync.publish(3)
    assert sender.exports == [2]
    assert [push.num_resent for push in pushes] == [0, 1, 0]
    assert [receiver.bases for receiver in receivers] == [[None, 1, 2]] * 2, "it was given the version of the push"


async def test_waves_get_changes_since_one_version_and_the_last_one_makes_the_next_base() -> None:
    sender, receivers, sync = bench(2, DeltaReceiver, DELTA, wave_size=1)
    for version in (1, 2):
        await sync.publish(version)
    assert sender.steps == [VersionStep(*step) for step in ((1, None, 0), (1, None, 1), (2, 1, 0), (2, 1, 1))]


async def test_an_attempt_after_a_failure_sends_whole_tensors() -> None:
    sender = BreakingSender(manifest=DELTA)
    receiver = Mortal("rollout/0", sender, CUT_OFF)
    sync = weight_sync(sender, receiver)
    sender.breaks, receiver.num_failures = False, 0
    await sync.publish(1)
    sender.breaks, receiver.num_failures = True, 1
    await sync.publish(2)
    await sync.publish(3)
    assert [step.base_version for step in sender.steps if step] == [None, 1, None, 2]
