"""LearnerGroup: the learner's ranks as one role."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cluster.errors import DeadlineError, LostObjectError, PlacementError, WorkerDiedError
from cluster.records.trajectory import Prompt, ScoredGroup
from cluster.roles import UpdateReport
from cluster.runtime.concurrency import outcomes
from cluster.runtime.ray_actors import answer, beside, kill, stop
from cluster.runtime.vitals import Vitals
from cluster.weight_sync.manifest import Manifest
from cluster.weight_sync.transport import Rendezvous
from configs.schema import TimeoutsConfig
from learner.process_group import is_peer_lost
from learner.supervised import SupervisedExample

CAUSE_S = 2.0  # that a rank which the others miss has to say what happened to it


class StepRows(Protocol):
    """Where the supervised rows of a step come from (`cluster.rollout.supervised_rows.SupervisedRows`)."""

    async def of(self, version: int) -> Sequence[ScoredGroup]:
        """Those of the step that makes `version`."""
        ...


class NoRows:
    """A step has its groups alone."""

    async def of(self, version: int) -> Sequence[ScoredGroup]:
        return ()


class LearnerGroup:
    """Implements `cluster.roles.Learner` over the handles of `learner.learner.Learner` workers, one a rank.

    A call goes to all ranks at once, and rank 0's answer counts; the first rank that fails ends the wait for all.
    """

    def __init__(
        self,
        spawn: Callable[[], Sequence[Any]],
        timeouts: TimeoutsConfig,
        put: Callable[[Any], Any],
        beside: StepRows | None = None,
    ) -> None:
        """`spawn()` starts the process of every rank and returns the handles; another time it may have to look for a
        place first, and block. `put` puts what all ranks are given into the object store, once, and returns a reference
        that Ray resolves to its value in each rank; the caller's process owns it. `beside` has the rows that a step
        trains beside its groups.
        """
        self._beside = beside or NoRows()
        self._spawn = spawn
        self._put = put
        self._workers: Sequence[Any] = spawn()
        self._timeouts = timeouts
        self.version = 0
        self.is_started = False
        self.num_calls = 0  # of all ranks together, under way
        self.vitals: dict[int, Vitals] = {}  # of each rank's newest sign of life

    @property
    def workers(self) -> Sequence[Any]:
        return self._workers

    async def start(self) -> None:
        """Load the policy on every rank and bring the ranks together."""
        timeout_s = self._timeouts.start_s
        address = await answer(
            self._workers[0].rendezvous_address.remote(), timeout_s=timeout_s, what="learner/0 to name its address"
        )
        await self._all([w.connect.remote(address) for w in self._workers], timeout_s, "to connect")
        self.is_started = True

    async def respawn(self) -> None:
        """End every rank at once, whatever it does, and start all of them again, on version 0.

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
            raise WorkerDiedError(f"the learner has no place: {error}") from error
        self.version = 0
        await self.start()

    async def begin_rl(self) -> None:
        """RL begins with the weights of this moment."""
        calls = [w.begin_rl.remote() for w in self._workers]
        await self._all(calls, self._timeouts.start_s, "to begin RL")

    async def update(self, groups: Sequence[ScoredGroup]) -> UpdateReport:
        """One step; the version after it is the one before it plus 1.

        Raises:
            LostObjectError: no rank could get at the groups, and each is as it was before.
        """
        rows = await self._beside.of(self.version + 1)
        shared = (self._put(groups), self.version + 1, *([self._put(rows)] if rows else []))
        calls = [w.update.remote(*shared) for w in self._workers]
        try:
            report: UpdateReport = await self._all(
                calls, self._timeouts.update_s, f"to make version {self.version + 1}"
            )
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

    async def supervised_step(self, examples: Sequence[SupervisedExample]) -> Mapping[str, float]:
        shared = self._put(examples)
        calls = [w.supervised_step.remote(shared) for w in self._workers]
        return await self._all(calls, self._timeouts.update_s, "to take a supervised step")

    async def answer_accuracy(self, examples: Sequence[SupervisedExample]) -> float:
        shared = self._put(examples)
        calls = [w.answer_accuracy.remote(shared) for w in self._workers]
        return await self._all(calls, self._timeouts.update_s, "to check answers")

    async def sequence_logprobs(self, prompt: Prompt) -> np.ndarray:
        """float32 [P - 1], at temperature 1 and without bans."""
        calls = [w.sequence_logprobs.remote(prompt) for w in self._workers]
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
        call = self._workers[0].leave_transfer.remote(epoch)
        await answer(call, timeout_s=self._timeouts.update_s, what=f"learner/0 to leave transfer epoch {epoch}")

    async def send_weights(self, bucket_bytes: int, epoch: int) -> None:
        calls = [w.send_weights.remote(bucket_bytes, epoch) for w in self._workers]
        await self._all(calls, self._timeouts.update_s, "to send its weights")

    async def export_weights(self, bucket_bytes: int) -> tuple[int, Any]:
        """The version, and a reference to its packed buckets; they stay in the object store, owned by the caller."""
        calls = [w.export_weights.options(num_returns=2).remote(bucket_bytes) for w in self._workers]
        version = await self._all([version for version, _ in calls], self._timeouts.update_s, "to gather its weights")
        return version, calls[0][1]

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
        calls = [beside(w.finish_save).remote() for w in self._workers]
        await self._all(calls, self._timeouts.checkpoint_s, "to write the copy of its state")
        return True

    async def load(self, folder: Path) -> int:
        """Go on from a saved state; returns its version."""
        calls = [w.load.remote(folder) for w in self._workers]
        self.version = await self._all(calls, self._timeouts.checkpoint_s, f"to load {folder}")
        return self.version

    async def export(self, folder: Path) -> None:
        calls = [w.export.remote(folder) for w in self._workers]
        await self._all(calls, self._timeouts.checkpoint_s, f"to export to {folder}")

    async def close(self) -> None:
        """End every rank; each gets `timeouts.stop_s` to do it in good order."""
        await asyncio.gather(
            *(stop(w, timeout_s=self._timeouts.stop_s, what=f"learner/{n}") for n, w in enumerate(self._workers))
        )

    async def _refuse_if_apart(self, calls: Sequence[Any], lost: LostObjectError) -> None:
        """A rank that has got at the groups waits for the others in the middle of its update.

        Raises:
            WorkerDiedError: there is one; the ranks can only be started again.
        """
        timeout_s = self._timeouts.object_s
        waits = (answer(call, timeout_s=timeout_s, what=f"learner/{n} to miss groups") for n, call in enumerate(calls))
        if not all(isinstance(outcome, LostObjectError) for outcome in await outcomes(*waits)):
            raise WorkerDiedError(f"some learner ranks began an update that others could not: {lost}") from lost

    async def _all(self, calls: Sequence[Any], timeout_s: float, what: str) -> Any:
        """Raises: WorkerDiedError: a rank died, or others noticed that before Ray did."""
        self.num_calls += 1
        try:
            answers = await asyncio.gather(
                *(answer(call, timeout_s=timeout_s, what=f"learner/{n} {what}") for n, call in enumerate(calls))
            )
        except Exception as error:
            if not is_peer_lost(error):
                raise
            await self._raise_cause(calls, what)
            raise WorkerDiedError(f"a learner rank was lost to the others, which were {what}: {error}") from error
        finally:
            self.num_calls -= 1
        return answers[0] if answers else None

    async def _raise_cause(self, calls: Sequence[Any], what: str) -> None:
        """Some ranks miss another one: raise what happened to that one, if it is known within `CAUSE_S`."""
        waits = (answer(call, timeout_s=CAUSE_S, what=f"learner/{n} {what}") for n, call in enumerate(calls))
        for outcome in await outcomes(*waits):
            if isinstance(outcome, Exception) and not isinstance(outcome, DeadlineError) and not is_peer_lost(outcome):
                raise outcome
