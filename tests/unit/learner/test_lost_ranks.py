"""A restored learner has the weights that it would have had, and takes no step twice that counts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import LocalHandle, make_scored

from mobula.cluster.errors import CheckpointError, DeadlineError, RestartLoopError, WeightSyncError, WorkerDiedError
from mobula.cluster.failures import Failure
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.recovery.lost_ranks import RestoredRanks
from mobula.cluster.roles import UpdateReport
from mobula.cluster.weight_sync.changes import VersionStep
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.cluster.weight_sync.transport import Rendezvous
from mobula.cluster.workers.status import MAX_EQUAL, RestartBudget, RestartPolicy
from mobula.configs.schema import TimeoutsConfig
from mobula.learner.learner_group import LearnerGroup

POLICY = RestartPolicy(max_restarts=3, window_s=1000, backoff_s=0.001, max_backoff_s=0.01)


class FakeRank:
    """A rank whose weights are the list of everything that it was trained on."""

    def __init__(self) -> None:
        self.version = 0
        self.weights: list[str] = []
        self.saved: dict[Path, tuple[int, list[str]]] = {}
        self.num_respawns = 0
        self.epochs: set[int] = set()
        self.dies_in: dict[str, int] = {}  # method -> how many of its next calls find a rank dead
        self.dies_of: WorkerDiedError | None = None
        self.is_silent = False
        self.is_alone = False  # no receiver comes to a transfer group

    def respawn(self) -> None:
        self.num_respawns += 1
        self.version, self.weights, self.epochs, self.is_silent = 0, [], set(), False

    async def rendezvous_address(self) -> str:
        return "here:1"

    async def connect(self, address: str) -> None:
        self._answer("connect")

    async def update(self, groups: Sequence[ScoredGroup], version: int, **more: Any) -> UpdateReport:
        if self.is_silent:
            await asyncio.Event().wait()
        self.weights += [group.summary.group_id for group in groups]  # half an update is done when a rank dies
        self._answer("update")
        self.version = version
        return UpdateReport(self.version, {})

    async def save(self, folder: Path) -> None:
        self._answer("save")
        self.saved[folder] = (self.version, list(self.weights))

    async def finish_save(self) -> None:
        self._answer("finish_save")

    async def load(self, folder: Path) -> int:
        self._answer("load")
        self.version, weights = self.saved[folder]
        self.weights = list(weights)
        return self.version

    async def restore(self, folder: Path, version: int) -> None:
        self._answer("restore")
        self.version, self.weights = version, list(self.saved[folder][1])

    async def manifest(self) -> Manifest:
        return Manifest(())

    async def open_transfer(self, epoch: int, num_receivers: int) -> Rendezvous:
        return Rendezvous("here", 1, epoch, num_receivers + 1, "gloo", 1.0)

    async def join_transfer(self, rendezvous: Rendezvous) -> None:
        if self.is_alone:
            raise DeadlineError("waited 1 s for learner/0 to join a transfer group")
        self._answer("join_transfer")
        self.epochs.add(rendezvous.epoch)

    async def send_weights(self, bucket_bytes: int, epoch: int, step: VersionStep | None = None) -> None:
        self._answer("send_weights")
        if epoch not in self.epochs:
            raise WeightSyncError(f"the learner is not in transfer group {epoch}")

    async def sequence_logprobs(self, prompt: Any, num_copies: int) -> list[str]:
        self._answer("sequence_logprobs")
        return list(self.weights)

    def _answer(self, method: str) -> None:
        if self.dies_in.get(method, 0) > 0:
            self.dies_in[method] -= 1
            raise self.dies_of or WorkerDiedError(f"learner/1 died in {method}")


class FakeGroup(LearnerGroup):
    """A learner group of one rank, which is the same object after a restart."""

    def __init__(self, rank: FakeRank) -> None:
        super().__init__(lambda: [LocalHandle(rank)], TimeoutsConfig(), lambda value: value)
        self.rank = rank

    async def replaced(self, workers: Sequence[Any]) -> Sequence[Any]:
        self.rank.respawn()
        return workers


class Bench:
    """A learner that is restored, with its rank and its checkpoints."""

    def __init__(
        self, ranks: FakeRank | None = None, policy: RestartPolicy = POLICY, group: type[FakeGroup] = FakeGroup
    ) -> None:
        self.ranks = ranks or FakeRank()
        self.checkpoint: tuple[int, Path] | None = None
        self.lost: list[str] = []
        self.learner = group(self.ranks)
        self.learner.lost_ranks = self.policy = RestoredRanks(
            self.learner, newest=lambda: self.checkpoint, budget=RestartBudget(policy), on_lost=self.lost.append
        )

    @classmethod
    async def saved(cls, *args: Any) -> Bench:
        """With a checkpoint of version 0."""
        bench = cls(*args)
        await bench.save()
        return bench

    async def save(self) -> None:
        folder = Path(f"step-{self.ranks.version}")
        version = self.ranks.version
        await self.learner.save(folder)
        self.checkpoint = (version, folder)

    async def scored(self) -> Any:
        return await self.learner.sequence_logprobs(None)  # type: ignore[arg-type]

    async def meet(self, epoch: int) -> None:
        await self.learner.join_transfer(await self.learner.open_transfer(epoch, 1))

    async def train(self, *numbers: int) -> int:
        """One step after the other, each on a group of the number; the version of the last one."""
        for number in numbers:
            version = (await self.learner.update([make_scored(f"0/{number}/s")])).version
        return version

    async def ends(self, match: str, error: type[Exception] = WorkerDiedError) -> None:
        """The next step ends the run."""
        with pytest.raises(error, match=match):
            async with asyncio.timeout(5):
                await self.train(0)


def trained_on(*numbers: int) -> list[str]:
    return [f"0/{number}/s" for number in numbers]


@pytest.mark.parametrize("method", ["update", "save", "sequence_logprobs"])
async def test_a_rank_that_dies_costs_nothing_but_time(method: str) -> None:
    bench = await Bench.saved()
    for n in range(4):
        if n == 2:
            bench.ranks.dies_in[method] = 1
        assert await bench.train(n) == n + 1
        if n in (0, 2):
            await bench.save()
        await bench.scored()
    assert bench.ranks.weights == trained_on(0, 1, 2, 3)
    assert (bench.ranks.num_respawns, bench.lost) == (1, ["learner_died"])


async def test_only_steps_after_the_checkpoint_are_taken_again() -> None:
    bench = await Bench.saved()
    await bench.train(0, 1, 2)
    await bench.save()
    await bench.train(3)
    bench.ranks.dies_in["update"] = 1
    await bench.train(4)
    assert bench.policy.num_steps_repeated == 1
    assert bench.ranks.weights == trained_on(0, 1, 2, 3, 4)


async def test_a_death_while_it_is_restored_is_restored_again() -> None:
    bench = await Bench.saved()
    await bench.train(0)
    bench.ranks.dies_in = {"update": 2}  # the next step, and the one that is taken again
    assert await bench.train(1) == 2
    assert bench.ranks.weights == trained_on(0, 1)
    assert bench.ranks.num_respawns == 2


async def test_a_push_ends_in_an_error_that_asks_for_a_new_epoch() -> None:
    bench = await Bench.saved()
    await bench.meet(1)
    bench.ranks.dies_in["send_weights"] = 1
    with pytest.raises(WeightSyncError, match="not in transfer group 1"):
        await bench.learner.send_weights(64, 1)
    await bench.meet(2)
    await bench.learner.send_weights(64, 2)


async def test_a_learner_that_waits_in_vain_for_a_receiver_is_not_lost() -> None:
    bench = await Bench.saved()
    bench.ranks.is_alone = True
    with pytest.raises(WeightSyncError, match="transfer group of epoch 1 did not form"):
        await bench.meet(1)
    assert (bench.ranks.num_respawns, bench.lost) == (0, [])


async def test_a_transfer_group_that_went_with_its_ranks_is_not_joined_by_the_new_ones() -> None:
    bench = await Bench.saved()
    bench.ranks.dies_in["join_transfer"] = 1
    with pytest.raises(WeightSyncError, match="epoch 1 was lost with the learner ranks that had opened it"):
        await bench.meet(1)
    assert (bench.ranks.num_respawns, bench.lost) == (1, ["learner_died"])
    await bench.meet(2)


async def test_a_silent_rank_is_not_waited_for_once_it_is_reported_lost() -> None:
    bench = await Bench.saved()
    bench.ranks.is_silent = True
    step = asyncio.create_task(bench.train(0))
    await asyncio.sleep(0.01)
    assert not step.done()
    bench.policy.lose(DeadlineError("learner/0 did not answer a ping"))
    async with asyncio.timeout(5):
        assert await step == 1
    assert (bench.ranks.weights, bench.lost) == (trained_on(0), ["learner_hung"])


async def test_a_loss_that_is_noticed_between_calls_is_made_good_at_the_next_call() -> None:
    bench = await Bench.saved()
    bench.policy.lose(WorkerDiedError("learner/0 died"))
    assert await bench.train(0) == 1
    assert bench.ranks.num_respawns == 1


async def test_calls_that_fail_together_restore_once() -> None:
    bench = await Bench.saved()
    bench.ranks.dies_in = {"update": 1, "sequence_logprobs": 1}
    version, weights = await asyncio.gather(bench.train(0), bench.scored())
    assert version == 1
    assert bench.ranks.weights == trained_on(0)
    assert set(weights) <= set(trained_on(0))
    assert bench.ranks.num_respawns == 1


async def test_without_a_checkpoint_the_loss_ends_the_run() -> None:
    bench = Bench()
    bench.ranks.dies_in["update"] = 1
    await bench.ends("before its first checkpoint: learner/1 died")


async def test_the_budget_ends_it() -> None:
    bench = await Bench.saved()
    bench.ranks.dies_in["update"] = 99
    await bench.ends(r"lost 4 times, .*resume=auto")
    assert bench.ranks.num_respawns == POLICY.max_restarts


async def test_a_step_that_always_hangs_ends_the_run_although_each_try_outlasts_the_window() -> None:
    class Slow(FakeRank):
        async def update(self, groups: Sequence[ScoredGroup], version: int, **more: Any) -> UpdateReport:
            await asyncio.sleep(0.02)
            raise DeadlineError

    bench = await Bench.saved(Slow(), replace(POLICY, window_s=0.01))
    await bench.ends("or at one step; last: waited 300 s for learner/0 to make version 1")
    assert bench.ranks.num_respawns == POLICY.max_restarts


async def test_a_node_that_never_returns_ends_the_run_although_each_try_outlasts_the_window() -> None:
    class Unplaced(FakeGroup):
        async def replaced(self, workers: Sequence[Any]) -> Sequence[Any]:
            self.rank.respawn()
            await asyncio.sleep(0.02)
            raise WorkerDiedError("the learner has no place: waited 30 s for the cluster to reserve learner/0")

    bench = await Bench.saved(None, replace(POLICY, window_s=0.01), Unplaced)
    bench.ranks.dies_in["update"] = 1
    await bench.ends(r"or at one step; last: .* for the cluster to reserve learner/0")
    assert bench.ranks.num_respawns == POLICY.max_restarts


def crash() -> WorkerDiedError:
    error = WorkerDiedError("its actor died: its process 7 crashed with SIGSEGV")
    error.failure = Failure("its process 7 crashed with SIGSEGV", fingerprint="SIGSEGV|model.py:7")
    return error


async def test_ranks_that_crash_again_and_again_in_one_step_end_the_run_before_the_budget() -> None:
    bench = await Bench.saved()
    bench.ranks.dies_in["update"], bench.ranks.dies_of = 99, crash()
    await bench.ends(r"lost 3 times in a row at the same step .*SIGSEGV.*resume=auto", RestartLoopError)
    assert bench.ranks.num_respawns == MAX_EQUAL - 1 < POLICY.max_restarts


async def test_crashes_in_different_steps_are_no_loop() -> None:
    bench = Bench()
    bench.ranks.dies_of = crash()
    for n in range(MAX_EQUAL):
        await bench.save()
        bench.ranks.dies_in["update"] = 1
        assert await bench.train(n) == n + 1


async def test_a_checkpoint_of_another_version_is_refused() -> None:
    bench = await Bench.saved()
    bench.checkpoint = (7, Path("step-0"))
    bench.ranks.dies_in["update"] = 1
    await bench.ends("holds version 0 instead of 7", CheckpointError)


async def test_an_error_of_the_learner_itself_is_not_a_loss() -> None:
    class Broken(FakeRank):
        async def update(self, groups: Sequence[ScoredGroup], version: int, **more: Any) -> UpdateReport:
            raise ValueError("the loss needs reference log-probs")

    bench = await Bench.saved(Broken())
    await bench.ends("needs reference", ValueError)
    assert bench.ranks.num_respawns == 0


async def test_a_copy_that_ranks_had_before_they_were_restored_is_lost() -> None:
    bench = await Bench.saved()
    assert await bench.learner.finish_save()
    await bench.train(0)
    await bench.learner.save(Path("step-1"))
    bench.ranks.dies_in["finish_save"] = 1
    assert not await bench.learner.finish_save()
    await bench.learner.save(Path("step-1"))
    bench.ranks.dies_in["update"] = 1
    await bench.train(1)
    assert not await bench.learner.finish_save(), "an update had them restored meanwhile"
    await bench.learner.save(Path("step-2"))
    assert await bench.learner.finish_save()


@pytest.mark.parametrize("method", ["restore", "update"])
async def test_restored_weights_survive_a_lost_rank_although_a_newer_checkpoint_was_discarded(method: str) -> None:
    bench = await Bench.saved()
    await bench.train(0)
    await bench.save()
    good = Path("step-1")
    await bench.train(1)
    await bench.save()  # version 2, which the rollback discards
    await bench.train(2)
    if method == "restore":
        bench.ranks.dies_in["restore"] = 1
    await bench.learner.restore(good, 3)
    assert (bench.ranks.version, bench.ranks.weights) == (3, trained_on(0))
    await bench.train(3)
    if method == "update":
        bench.ranks.dies_in["update"] = 1
    assert await bench.train(4) == 5
    assert bench.ranks.weights == trained_on(0, 3, 4)
    await bench.save()
    bench.ranks.dies_in["update"] = 1
    assert await bench.train(5) == 6
    assert (bench.ranks.weights[-2:], bench.ranks.num_respawns) == (trained_on(4, 5), 2)


async def test_the_loss_of_ranks_that_are_not_restarted_is_raised() -> None:
    rank = FakeRank()
    rank.dies_in["update"] = 1
    with pytest.raises(WorkerDiedError, match="learner/1 died in update"):
        await FakeGroup(rank).update([make_scored("0/0/s")])
    assert rank.num_respawns == 0


async def test_observers_see_each_step_once_and_each_restart() -> None:
    class Seen(list[tuple[str, int]]):
        def trained(self, version: int, groups: Sequence[ScoredGroup]) -> None:
            self.append(("trained", version))

        def repeated(self, version: int, groups: Sequence[ScoredGroup]) -> None:
            self.append(("repeated", version))

        def restored(self, version: int) -> None:
            self.append(("restored", version))

    bench, seen = await Bench.saved(), Seen()
    bench.learner.lost_ranks.observers.append(seen)
    await bench.train(0)
    bench.ranks.dies_in["update"] = 1
    await bench.train(1)
    assert seen == [("trained", 1), ("restored", 0), ("repeated", 1), ("trained", 2)]
    assert bench.learner.num_restarts == 1
