"""LearnerGroup: the learner's ranks as one role; RankGroup: ranks of any model that the driver calls all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mobula.cluster.errors import DeadlineError, LostObjectError, PlacementError, WorkerDiedError
from mobula.cluster.records.trajectory import Prompt, ScoredGroup
from mobula.cluster.roles import UpdateReport
from mobula.cluster.rollout.supervised_rows import SupervisedRows
from mobula.cluster.runtime.concurrency import outcomes
from mobula.cluster.runtime.ray_actors import answer, in_background, kill, stop
from mobula.cluster.runtime.vitals import Vitals
from mobula.cluster.weight_sync.fresh_samples import FreshSamples
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.cluster.weight_sync.transport import Rendezvous
from mobula.configs.schema import TimeoutsConfig
from mobula.learner.backends.process_group import is_peer_lost
from mobula.learner.examples.entries import stored_examples
from mobula.learner.examples.examples import Outlined

CAUSE_S = 2.0  # that a rank which the others miss has to say what happened to it


class RankGroup:
    """Calls the handles of workers, one a rank, which meet in one process group.

    A call goes to all ranks at once, and rank 0's answer counts; the first rank that fails ends the wait for all.
    """

    def __init__(self, spawn: Callable[[], Sequence[Any]], timeouts: TimeoutsConfig, role: str) -> None:
        """`spawn()` starts the process of every rank and returns the handles; another time it may have to look for a
        place first, and block. Errors call a rank `ROLE/INDEX`.
        """
        self.role = role
        self._spawn = spawn
        self._workers: Sequence[Any] = spawn()
        self._timeouts = timeouts
        self.is_started = False
        self.num_calls = 0  # of all ranks together, under way
        self.vitals: dict[int, Vitals] = {}  # of each rank's newest sign of life

    @property
    def workers(self) -> Sequence[Any]:
        return self._workers

    async def start(self) -> None:
        """Load the model on every rank and bring the ranks together."""
        timeout_s = self._timeouts.start_s
        address = await answer(
            self._workers[0].rendezvous_address.remote(), timeout_s=timeout_s, what=f"{self.role}/0 to name its address"
        )
        await self._all([w.connect.remote(address) for w in self._workers], timeout_s, "to connect")
        self.is_started = True

    async def respawn(self) -> None:
        """End every rank at once, whatever it does, and start all of them again.

        Raises:
            WorkerDiedError: there is no place for them now.
        """
        self.is_started = False
        self.vitals.clear()
        for worker in self._workers:
            kill(worker)
        try:
            self._workers = await asyncio.to_thread(self._spawn)
        except PlacementError as error:
            raise WorkerDiedError(f"the {self.role} has no place: {error}") from error
        await self.start()

    async def offload(self, part: str) -> None:
        calls = [w.offload.remote(part) for w in self._workers]
        await self._all(calls, self._timeouts.update_s, f"to move its {part} to the host")

    async def onload(self) -> None:
        calls = [w.onload.remote() for w in self._workers]
        await self._all(calls, self._timeouts.update_s, "to move back to its device")

    async def save(self, folder: Path) -> None:
        """Take a copy of the state and begin to write it; `finish_save` waits for that."""
        calls = [w.save.remote(folder) for w in self._workers]
        await self._all(calls, self._timeouts.checkpoint_s, f"to copy its state for {folder}")

    async def finish_save(self) -> bool:
        """Wait until every rank has written the copy that it has, if it has one."""
        calls = [in_background(w.finish_save).remote() for w in self._workers]
        await self._all(calls, self._timeouts.checkpoint_s, "to write the copy of its state")
        return True

    async def load(self, folder: Path) -> int:
        """Go on from a saved state; returns its version."""
        calls = [w.load.remote(folder) for w in self._workers]
        version: int = await self._all(calls, self._timeouts.checkpoint_s, f"to load {folder}")
        return version

    async def close(self) -> None:
        """End every rank; each gets `timeouts.stop_s` to do it in good order."""
        await asyncio.gather(
            *(stop(w, timeout_s=self._timeouts.stop_s, what=f"{self.role}/{n}") for n, w in enumerate(self._workers))
        )

    async def _all(self, calls: Sequence[Any], timeout_s: float, what: str) -> Any:
        """Raises: WorkerDiedError: a rank died, or others noticed that before Ray did."""
        # Counted for `mobula status`: a rank is busy while a call is in progress.
        self.num_calls += 1
        try:
            answers = await asyncio.gather(
                *(answer(call, timeout_s=timeout_s, what=f"{self.role}/{n} {what}") for n, call in enumerate(calls))
            )
        except Exception as error:
            if not is_peer_lost(error):
                raise
            await self._raise_cause(calls, what)
            raise WorkerDiedError(f"a {self.role} rank was lost to the others, which were {what}: {error}") from error
        finally:
            self.num_calls -= 1
        return answers[0] if answers else None

    async def _raise_cause(self, calls: Sequence[Any], what: str) -> None:
        """Some ranks miss another one: raise what happened to that one, if it is known within `CAUSE_S`."""
        waits = (answer(call, timeout_s=CAUSE_S, what=f"{self.role}/{n} {what}") for n, call in enumerate(calls))
        for outcome in await outcomes(*waits):
            if isinstance(outcome, Exception) and not isinstance(outcome, DeadlineError) and not is_peer_lost(outcome):
                raise outcome


class LearnerGroup(RankGroup):
    """Implements `cluster.roles.Learner` over the handles of `mobula.learner.learner.Learner` workers, one a rank."""

    def __init__(
        self,
        spawn: Callable[[], Sequence[Any]],
        timeouts: TimeoutsConfig,
        put: Callable[[Any], Any],
        beside: SupervisedRows | None = None,
    ) -> None:
        """`put` puts what all ranks are given into the object store, once, and returns a reference that Ray resolves to
        its value in each rank; the caller's process owns it. `beside` has the rows that a step trains beside its
        groups.
        """
        super().__init__(spawn, timeouts, "learner")
        self._beside = beside
        self._put = put
        self._fresh: FreshSamples | None = None
        self.version = 0

    def measure_with(self, fresh: FreshSamples) -> None:
        """Measure the log-prob gap on groups of `fresh`, where those of a step are of older weights."""
        self._fresh = fresh

    @property
    def groups(self) -> tuple[RankGroup, ...]:
        """All ranks that train, by the model that they hold."""
        return (self,)

    async def respawn(self) -> None:
        """End every rank at once, whatever it does, and start all of them again, on version 0.

        Raises:
            WorkerDiedError: there is no place for them now.
        """
        self.version = 0
        await super().respawn()

    async def begin_rl(self) -> None:
        """RL begins with the weights of this moment."""
        calls = [w.begin_rl.remote() for w in self._workers]
        await self._all(calls, self._timeouts.start_s, "to begin RL")

    async def update(self, groups: Sequence[ScoredGroup], values: Any = None) -> UpdateReport:
        """One step; the version after it is the one before it plus 1. `values` are those of a critic that has ranks of
        its own, or a reference to them.

        Raises:
            LostObjectError: no rank could get at the groups, and each is as it was before.
        """
        rows = () if self._beside is None else await self._beside.of(self.version + 1)
        more = {} if values is None else {"values": values}
        more |= {"supervised": self._put(rows)} if rows else {}
        fresh = None if self._fresh is None else self._fresh.begin(self.version, groups)
        more |= {} if fresh is None else {"fresh": [fresh]}  # in a list: the ranks begin before it is there
        shared, version = self._put(groups), self.version + 1
        calls = [w.update.remote(shared, version, **more) for w in self._workers]
        try:
            report: UpdateReport = await self._all(calls, self._timeouts.update_s, f"to make version {version}")
        except LostObjectError as error:
            await self._refuse_if_apart(calls, error)
            raise
        self.version = report.version
        return report

    async def assess(self, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        """The metrics of an offline job on these rows."""
        shared = self._put(groups)
        calls = [w.assess.remote(shared) for w in self._workers]
        return await self._all(calls, self._timeouts.update_s, "to assess held-out rows")

    async def supervised_step(self, examples: Sequence[Outlined]) -> Mapping[str, float]:
        """One step of the warm start."""
        shared = self._put(stored_examples(examples, self._put))
        calls = [w.supervised_step.remote(shared) for w in self._workers]
        return await self._all(calls, self._timeouts.update_s, "to take a supervised step")

    async def answer_accuracy(self, examples: Sequence[Outlined]) -> float:
        """Of a warm start."""
        shared = self._put(stored_examples(examples, self._put))
        calls = [w.answer_accuracy.remote(shared) for w in self._workers]
        return await self._all(calls, self._timeouts.update_s, "to check answers")

    async def sequence_logprobs(self, prompt: Prompt, num_copies: int = 1) -> np.ndarray:
        """float32 [P - 1], at temperature 1 and without bans."""
        calls = [w.sequence_logprobs.remote(prompt, num_copies) for w in self._workers]
        return await self._all(calls, self._timeouts.update_s, "to score the probe prompt")

    async def manifest(self) -> Manifest:
        call = self._workers[0].manifest.remote()
        return await answer(call, timeout_s=self._timeouts.start_s, what="learner/0 to list its weights")

    async def open_transfer(self, epoch: int, num_receivers: int) -> Rendezvous:
        call = self._workers[0].open_transfer.remote(epoch, num_receivers)
        return await answer(call, timeout_s=self._timeouts.start_s, what=f"learner/0 to open transfer epoch {epoch}")

    async def join_transfer(self, rendezvous: Rendezvous) -> None:
        calls = [w.join_transfer.remote(rendezvous) for w in self._workers]
        await self._all(calls, rendezvous.timeout_s, f"to join transfer epoch {rendezvous.epoch}")

    async def leave_transfer(self, epoch: int) -> None:
        calls = [w.leave_transfer.remote(epoch) for w in self._workers]
        await self._all(calls, self._timeouts.update_s, f"to leave transfer epoch {epoch}")

    async def send_weights(self, bucket_bytes: int, epoch: int) -> None:
        calls = [w.send_weights.remote(bucket_bytes, epoch) for w in self._workers]
        await self._all(calls, self._timeouts.update_s, "to send its weights")

    async def export_weights(self, bucket_bytes: int) -> tuple[int, Sequence[Any]]:
        """The version, and a reference to each of its packed buckets.

        They stay in the object store, owned by the caller. Each is an object by itself: what does not fit into the
        store is spilled to disk.
        """
        num_buckets = sum(1 for _ in (await self.manifest()).buckets(bucket_bytes))
        calls = [w.export_buckets.options(num_returns=1 + num_buckets).remote(bucket_bytes) for w in self._workers]
        version = await self._all([version for version, *_ in calls], self._timeouts.update_s, "to gather its weights")
        return version, [calls[n % len(calls)][1 + n] for n in range(num_buckets)]

    async def load(self, folder: Path) -> int:
        """Go on from a saved state; returns its version."""
        self.version = await super().load(folder)
        return self.version

    async def export(self, folder: Path) -> None:
        calls = [w.export.remote(folder) for w in self._workers]
        await self._all(calls, self._timeouts.checkpoint_s, f"to export to {folder}")

    async def _refuse_if_apart(self, calls: Sequence[Any], lost: LostObjectError) -> None:
        """A rank that has got at the groups waits for the others in the middle of its update.

        Raises:
            WorkerDiedError: there is one; the ranks can only be started again.
        """
        # A rank that has fetched its share waits in a collective, and does not answer in this time.
        timeout_s = self._timeouts.object_s
        waits = (answer(call, timeout_s=timeout_s, what=f"learner/{n} to miss groups") for n, call in enumerate(calls))
        if not all(isinstance(outcome, LostObjectError) for outcome in await outcomes(*waits)):
            raise WorkerDiedError(f"some learner ranks began an update that others could not: {lost}") from lost
