"""The ranks of a model as one role: ModelRanks calls all of them at once, LearnerGroup trains the policy with them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mobula.cluster.errors import (
    CheckpointError,
    DeadlineError,
    LostObjectError,
    PlacementError,
    WeightSyncError,
    WorkerDiedError,
)
from mobula.cluster.guard.guard import KLScale
from mobula.cluster.records.trajectory import Prompt, ScoredGroup
from mobula.cluster.recovery.lost_ranks import Errors, RaiseLostRank
from mobula.cluster.roles import UpdateReport
from mobula.cluster.rollout.row_stream import SupervisedRows
from mobula.cluster.runtime.concurrency import outcomes, run_all
from mobula.cluster.runtime.ray_actors import answer, in_background, kill, stop
from mobula.cluster.runtime.vitals import Vitals
from mobula.cluster.weight_sync.changes import PushedChanges, VersionStep
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.cluster.weight_sync.tolerance import FreshSamples
from mobula.cluster.weight_sync.transport import Rendezvous
from mobula.configs.schema import TimeoutsConfig
from mobula.learner.backends.sharded import is_peer_lost
from mobula.learner.examples import NO_PLANNERS, Planners, SharedExample, stored_examples
from mobula.learner.shares import GROUPS, ROWS, Planner, Portion, as_argument, in_portions

T = TypeVar("T")
Arguments = Mapping[str, Any]
RankCall = Callable[[Any], Any]  # the handle of a rank -> a reference to the answer of its call
CAUSE_S = 2.0  # timeout for the error of a lost rank, after its peers have reported a broken collective


class ModelRanks:
    """Calls all ranks of a process group at once. The first failure ends the call, and `losses` decides what follows
    the loss of a rank."""

    def __init__(self, spawn: Callable[[], Sequence[Any]], timeouts: TimeoutsConfig, role: str) -> None:
        """
        Args:
            spawn: starts a process for every rank and returns the handles. On a respawn it may block until nodes have
                room.
            role: errors call a rank `ROLE/INDEX`.
        """
        self.role = role
        self._spawn = spawn
        self.workers: Sequence[Any] = spawn()
        self._timeouts = timeouts
        self.lost_ranks = RaiseLostRank()
        self.is_started = False
        self.num_calls = 0  # calls in progress
        self.num_restarts = 0
        self.vitals: dict[int, Vitals] = {}  # rank -> newest heartbeat

    async def start(self) -> None:
        address = await self._first(lambda w: w.rendezvous_address.remote(), "to name its address")
        await self._answers([w.connect.remote(address) for w in self.workers], self._timeouts.start_s, "to connect")
        self.is_started = True

    async def respawn(self) -> None:
        self.num_restarts += 1
        self.is_started = False
        self.vitals.clear()
        self.workers = await self.replaced(self.workers)
        await self.start()

    async def replaced(self, workers: Sequence[Any]) -> Sequence[Any]:
        """Kills ranks and returns the handles of new ones."""
        for worker in workers:
            kill(worker)
        try:
            return await asyncio.to_thread(self._spawn)
        except PlacementError as error:
            raise WorkerDiedError(f"the {self.role} has no place: {error}") from error

    async def close(self) -> None:
        """Stops every rank; kills ranks that take longer than `timeouts.stop_s`."""
        await asyncio.gather(
            *(stop(w, timeout_s=self._timeouts.stop_s, what=f"{self.role}/{n}") for n, w in enumerate(self.workers))
        )

    async def _each(self, call: RankCall, timeout_s: float, what: str, harmless: Errors = ()) -> list[Any]:
        """Calls all ranks and returns their results. `harmless` is as in `RaiseLostRank.call`."""
        return await self.lost_ranks.call(
            lambda: self._answers([call(worker) for worker in self.workers], timeout_s, what), harmless
        )

    async def _all(self, call: RankCall, timeout_s: float, what: str) -> Any:
        return next(iter(await self._each(call, timeout_s, what)), None)

    async def _first(self, call: RankCall, what: str) -> Any:
        return await answer(call(self.workers[0]), timeout_s=self._timeouts.start_s, what=f"{self.role}/0 {what}")

    async def _answers(self, calls: Sequence[Any], timeout_s: float, what: str) -> list[Any]:
        # Counted for `mobula status`: a rank is busy while a call is in progress.
        self.num_calls += 1
        try:
            return await asyncio.gather(
                *(answer(call, timeout_s=timeout_s, what=f"{self.role}/{n} {what}") for n, call in enumerate(calls))
            )
        except Exception as error:
            if not is_peer_lost(error):
                raise
            await self._raise_cause(calls, what)
            raise WorkerDiedError(f"a {self.role} rank was lost to the others, which were {what}: {error}") from error
        finally:
            self.num_calls -= 1

    async def _raise_cause(self, calls: Sequence[Any], what: str) -> None:
        """After broken collectives, raises the error of the lost rank, if it arrives within `CAUSE_S`."""
        waits = (answer(call, timeout_s=CAUSE_S, what=f"{self.role}/{n} {what}") for n, call in enumerate(calls))
        for outcome in await outcomes(*waits):
            if isinstance(outcome, Exception) and not isinstance(outcome, DeadlineError) and not is_peer_lost(outcome):
                raise outcome


class RankGroup(ModelRanks):
    """Ranks with one state: weights and optimizer of one model."""

    def __init__(self, spawn: Callable[[], Sequence[Any]], timeouts: TimeoutsConfig, role: str) -> None:
        super().__init__(spawn, timeouts, role)
        self.version = 0
        self._saved_by = 0  # `num_restarts` at the last copy

    @property
    def groups(self) -> tuple[RankGroup, ...]:
        """Ranks that train, by model. They are started, moved, saved and loaded together."""
        return (self,)

    async def offload(self, part: str) -> None:
        await self._of_groups(
            lambda w: w.offload.remote(part), self._timeouts.update_s, f"to move its {part} to the host"
        )

    async def onload(self) -> None:
        await self._of_groups(lambda w: w.onload.remote(), self._timeouts.update_s, "to move back to its device")

    async def save(self, folder: Path) -> None:
        """Copies the state and starts to write the copy; `finish_save` waits for the write."""
        what = f"to copy its state for {folder}"
        await self._of_groups(lambda w: w.save.remote(folder), self._timeouts.checkpoint_s, what)
        self._saved_by = self.num_restarts
        await self.lost_ranks.copied()

    async def finish_save(self) -> bool:
        """Waits until every rank has written its copy, if there is one. Returns False if it was lost with a rank."""
        saved_by, timeout_s = self._saved_by, self._timeouts.checkpoint_s
        await self._of_groups(
            lambda w: in_background(w.finish_save).remote(), timeout_s, "to write the copy of its state"
        )
        return self.num_restarts == saved_by

    async def load(self, folder: Path) -> int:
        found = await self._of_groups(lambda w: w.load.remote(folder), self._timeouts.checkpoint_s, f"to load {folder}")
        self.version = found[0]
        if any(version != self.version for version in found):
            raise CheckpointError(f"{folder} holds version {found[0]} of the policy and {found[1]} of the critic")
        return self.version

    async def restore(self, folder: Path, version: int) -> None:
        timeout_s, what = self._timeouts.checkpoint_s, f"to load {folder} as version {version}"
        await self._of_groups(lambda w: w.restore.remote(folder, version), timeout_s, what)
        self.version = version
        self.lost_ranks.moved(version, folder)

    async def _of_groups(self, call: RankCall, timeout_s: float, what: str) -> list[Any]:
        return await self.lost_ranks.call(lambda: run_all(*(g._all(call, timeout_s, what) for g in self.groups)))


class LearnerGroup(RankGroup):
    """Implements `cluster.roles.Learner` with `mobula.learner.learner.Learner` workers, one for each rank."""

    def __init__(
        self,
        spawn: Callable[[], Sequence[Any]],
        timeouts: TimeoutsConfig,
        put: Callable[[Any], Any],
        supervised: SupervisedRows | None = None,
        planners: Planners = NO_PLANNERS,
    ) -> None:
        """
        Args:
            put: stores a value in the object store, once for all ranks, and returns a reference that Ray resolves to
                the value in each rank. The caller's process owns the object.
            supervised: rows for the supervised term of each step's loss.
            planners: plan which groups, rows and examples each rank fetches, so that a rank receives the references of
                these alone.
        """
        super().__init__(spawn, timeouts, "learner")
        self._supervised = supervised
        self._put = put
        self._planners = planners
        self._fresh: FreshSamples | None = None
        self._kl_scale: KLScale | None = None
        self._opened: set[int] = set()  # transfer epochs of the current ranks

    def measure_with(self, fresh: FreshSamples) -> None:
        """Measures the log-prob gap on groups of `fresh` if the groups of a step were sampled with older weights."""
        self._fresh = fresh

    def scale_kl_with(self, kl_scale: KLScale) -> None:
        """Multiplies the KL coefficient of each step by the factor of its version."""
        self._kl_scale = kl_scale

    def kl_scale_at(self, version: int) -> float:
        """The factor of the KL coefficient for the step that makes `version`."""
        return 1.0 if self._kl_scale is None else self._kl_scale.at(version)

    async def respawn(self) -> None:
        """Kills every rank and starts all of them again, at version 0."""
        self.version = 0
        self._opened.clear()
        await super().respawn()

    async def begin_rl(self) -> None:
        await self._all(lambda w: w.begin_rl.remote(), self._timeouts.start_s, "to begin RL")

    async def update(self, groups: Sequence[ScoredGroup]) -> UpdateReport:
        """Runs one step, which increments the version."""
        report = await self.lost_ranks.call(lambda: self.step(groups))
        self.lost_ranks.trained(report.version, groups)
        return report

    async def step(self, groups: Sequence[ScoredGroup], values: Any = None) -> UpdateReport:
        """As `update`, for a step that may be a repetition.

        Args:
            values: of a critic with separate ranks, or a reference to them.
        """
        rows = () if self._supervised is None else await self._supervised.of(self.version + 1)
        more = {} if values is None else {"values": values}
        fresh = None if self._fresh is None else self._fresh.begin(self.version, groups)
        more |= {} if fresh is None else {"fresh": [fresh]}  # in a list: Ray starts the call before the group exists
        version = self.version + 1
        more |= {"kl_scale": scale} if (scale := self.kl_scale_at(version)) != 1 else {}

        async def call(rows: Sequence[Arguments], shared: Any, portions: Sequence[Portion | None]) -> UpdateReport:
            calls = [
                w.update.remote(shared, version, **more, **own_rows, **as_argument(portion))
                for w, own_rows, portion in zip(self.workers, rows, portions, strict=True)
            ]
            try:
                reports = await self._answers(calls, self._timeouts.update_s, f"to make version {version}")
            except LostObjectError as error:
                # A rank that has fetched its share waits in a collective and does not reply before the timeout.
                limit_s = self._timeouts.object_s
                waits = (answer(c, timeout_s=limit_s, what=f"learner/{n} to miss groups") for n, c in enumerate(calls))
                if not all(isinstance(outcome, LostObjectError) for outcome in await outcomes(*waits)):
                    message = f"some learner ranks began an update that others could not: {error}"
                    raise WorkerDiedError(message) from error
                raise
            return reports[0]

        async def with_rows(shared: Any, portions: Sequence[Portion | None]) -> UpdateReport:
            own = [{"supervised": shared} | as_argument(portion, "supervised_portion") for portion in portions]
            return await self._in_portions(partial(call, own), groups, version, self._planners.groups)

        if rows:
            report = await self._in_portions(with_rows, rows, version, self._planners.supervised, ROWS)
        else:
            no_rows: list[Arguments] = [{}] * len(self.workers)
            report = await self._in_portions(partial(call, no_rows), groups, version, self._planners.groups)
        self.version = report.version
        return report

    async def assess(self, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        async def call(shared: Any, portions: Sequence[Portion | None]) -> Mapping[str, float]:
            return await self._with_own(
                lambda w, own: w.assess.remote(shared, **own), portions, "to assess held-out rows"
            )

        return await self._in_portions(call, groups, self.version, self._planners.groups)

    async def supervised_step(self, examples: Sequence[SharedExample]) -> Mapping[str, float]:
        shared, portions = self._stored(examples)
        return await self._with_own(
            lambda w, own: w.supervised_step.remote(shared, **own), portions, "to take a supervised step"
        )

    async def answer_accuracy(self, examples: Sequence[SharedExample]) -> float:
        shared, portions = self._stored(examples)
        return await self._with_own(
            lambda w, own: w.answer_accuracy.remote(shared, **own), portions, "to check answers"
        )

    async def sequence_logprobs(self, prompt: Prompt, num_copies: int = 1) -> np.ndarray:
        """Returns float32 [P - 1], at temperature 1 and without bans."""
        return await self._all(
            lambda w: w.sequence_logprobs.remote(prompt, num_copies),
            self._timeouts.update_s,
            "to score the probe prompt",
        )

    async def manifest(self) -> Manifest:
        return await self.lost_ranks.call(lambda: self._first(lambda w: w.manifest.remote(), "to list its weights"))

    async def open_transfer(self, epoch: int, num_receivers: int) -> Rendezvous:
        what = f"to open transfer epoch {epoch}"
        rendezvous: Rendezvous = await self.lost_ranks.call(
            lambda: self._first(lambda w: w.open_transfer.remote(epoch, num_receivers), what)
        )
        self._opened.add(epoch)
        return rendezvous

    async def join_transfer(self, rendezvous: Rendezvous) -> None:
        """Joins the transfer group. A missed deadline does not mean a lost rank: the ranks may wait for a receiver."""
        epoch = rendezvous.epoch

        async def join() -> None:
            # Inside the repeated call: after a restart the group is gone, and a new one needs a new epoch.
            if epoch not in self._opened:
                raise WeightSyncError(f"transfer epoch {epoch} was lost with the learner ranks that had opened it")
            calls = [w.join_transfer.remote(rendezvous) for w in self.workers]
            await self._answers(calls, rendezvous.timeout_s, f"to join transfer epoch {epoch}")

        try:
            await self.lost_ranks.call(join, harmless=(DeadlineError,))
        except DeadlineError as error:
            raise WeightSyncError(f"transfer group of epoch {epoch} did not form: {error}") from error

    async def leave_transfer(self, epoch: int) -> None:
        self._opened.discard(epoch)
        what = f"to leave transfer epoch {epoch}"
        await self._all(lambda w: w.leave_transfer.remote(epoch), self._timeouts.update_s, what)

    async def send_weights(
        self, bucket_bytes: int, epoch: int, step: VersionStep | None = None
    ) -> PushedChanges | None:
        sent = await self._each(
            lambda w: w.send_weights.remote(bucket_bytes, epoch, step), self._timeouts.update_s, "to send its weights"
        )
        parts = [part for part in sent if part is not None]
        return PushedChanges.total(parts) if parts else None

    async def export_weights(self, bucket_bytes: int) -> tuple[int, Sequence[Any]]:
        """Returns the version and a reference to each packed bucket.

        The caller owns the objects. There is one object for each bucket, so that Ray can spill a part of them to disk.
        """
        num_buckets = sum(1 for _ in (await self.manifest()).buckets(bucket_bytes))

        async def export() -> tuple[int, Sequence[Any]]:
            calls = [w.export_buckets.options(num_returns=1 + num_buckets).remote(bucket_bytes) for w in self.workers]
            versions = [version for version, *_ in calls]
            version, *_ = await self._answers(versions, self._timeouts.update_s, "to gather its weights")
            return version, [calls[n % len(calls)][1 + n] for n in range(num_buckets)]

        return await self.lost_ranks.call(export)

    async def export(self, folder: Path) -> None:
        await self._all(lambda w: w.export.remote(folder), self._timeouts.checkpoint_s, f"to export to {folder}")

    async def _in_portions(
        self,
        call: Callable[[Any, Sequence[Portion | None]], Awaitable[T]],
        groups: Sequence[ScoredGroup],
        version: int,
        planned: Planner | None,
        kind: str = GROUPS,
    ) -> T:
        num_ranks = len(self.workers)
        return await in_portions(call, groups, version, num_ranks=num_ranks, planned=planned, put=self._put, kind=kind)

    async def _with_own(
        self, call: Callable[[Any, Arguments], Any], portions: Sequence[Portion | None], what: str
    ) -> Any:
        """Calls each rank with the argument of its portion; returns the result of rank 0."""

        async def calls() -> Any:
            own = zip(self.workers, map(as_argument, portions), strict=True)
            return (await self._answers([call(w, argument) for w, argument in own], self._timeouts.update_s, what))[0]

        return await self.lost_ranks.call(calls)

    def _stored(self, examples: Sequence[SharedExample]) -> tuple[Any, Sequence[Portion | None]]:
        stored, num_ranks = stored_examples(examples, self._put), len(self.workers)
        if self._planners.examples is None or num_ranks == 1:
            return self._put(stored), [None] * num_ranks
        outlines, portions = self._planners.examples(stored, num_ranks)
        return self._put(outlines), portions
