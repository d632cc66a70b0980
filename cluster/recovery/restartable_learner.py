"""RestartableLearner: a learner group that is restarted from its newest checkpoint when a rank is lost.

The state of a lost rank is lost, and the other ranks cannot continue without it. So all ranks are restarted, load the
newest complete checkpoint, and repeat the later steps with the groups that those steps had: an update is a function of
state and groups, so the weights are as before. Then the call that failed is repeated.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mobula.cluster.errors import CheckpointError, DeadlineError, LostObjectError, WeightSyncError
from mobula.cluster.records.trajectory import Prompt, ScoredGroup
from mobula.cluster.recovery.checkpoints import Durable
from mobula.cluster.roles import Learner, UpdateReport
from mobula.cluster.weight_sync.interfaces import Sender
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.cluster.weight_sync.transport import Rendezvous
from mobula.cluster.workers.colocation import MovableLearner
from mobula.cluster.workers.restart_policy import RestartBudget
from mobula.cluster.workers.restartable_role import NotRestartableError, RestartableRole

_logger = logging.getLogger(__name__)

Recall = Callable[[Sequence[ScoredGroup]], Awaitable[Sequence[ScoredGroup]]]


class Ranks(Learner, Sender, Durable, MovableLearner, Protocol):
    """The learner group."""

    version: int

    async def respawn(self) -> None:
        """End every rank at once and start all of them again."""
        ...

    async def export(self, folder: Path) -> None: ...

    async def assess(self, groups: Sequence[ScoredGroup]) -> Mapping[str, float]: ...


class RestartableLearner:
    """Implements `Ranks` around `ranks`, which are restarted whenever a call finds that one is dead or does not answer.

    Transfer groups do not survive: a push that is under way ends in a WeightSyncError, and is repeated in a group of a
    new epoch. Before the first checkpoint a loss ends the run.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        newest: Callable[[], tuple[int, Path] | None],
        budget: RestartBudget,
        on_lost: Callable[[str], None],
    ) -> None:
        """`newest()` returns version and learner folder of the newest complete checkpoint. `on_lost` is called with the
        kind of each loss.
        """
        self._ranks = ranks
        self._newest = newest
        self._furthest = -1  # version that was made
        self._restartable = RestartableRole(
            "learner",
            self._bring_back,
            budget=budget,
            on_lost=on_lost,
            position=lambda: self._furthest,
        )
        self._trained: list[tuple[int, Sequence[ScoredGroup]]] = []  # (version made, groups), since a checkpoint
        self._generation = 0  # of ranks
        self._saved_by = 0  # the generation that has the last copy
        self._opened: set[int] = set()  # transfer epochs of the ranks that are there now
        self._recall: Recall | None = None
        self.num_steps_repeated = 0

    @property
    def is_restarting(self) -> bool:
        """Whether all ranks are being restarted."""
        return self._restartable.is_restarting

    @property
    def num_restarts(self) -> int:
        return self._generation

    def lose(self, error: Exception) -> None:
        """Report that a rank is dead or does not answer: calls under way end now instead of at their deadline."""
        self._restartable.lose(error)

    async def update(self, groups: Sequence[ScoredGroup]) -> UpdateReport:
        report = await self._restartable.outliving(lambda: self._ranks.update(groups))
        self._furthest = report.version
        self._trained.append((report.version, groups))
        return report

    async def assess(self, groups: Sequence[ScoredGroup]) -> Mapping[str, float]:
        """The metrics of an offline job on these rows."""
        return await self._restartable.outliving(lambda: self._ranks.assess(groups))

    async def offload(self, part: str) -> None:
        await self._restartable.outliving(lambda: self._ranks.offload(part))

    async def onload(self) -> None:
        await self._restartable.outliving(self._ranks.onload)

    async def save(self, folder: Path) -> None:
        await self._restartable.outliving(lambda: self._ranks.save(folder))
        self._saved_by = self._generation
        newest = await asyncio.to_thread(self._newest)
        if newest is not None:  # its steps need not be repeated; this save is not complete yet
            self._trained = [(version, groups) for version, groups in self._trained if version > newest[0]]

    async def finish_save(self) -> bool:
        """Wait until the last copy is on disk; False if it was lost with the ranks that had it."""
        saved_by = self._saved_by
        return await self._restartable.outliving(self._ranks.finish_save) and self._generation == saved_by

    async def load(self, folder: Path) -> int:
        return await self._restartable.outliving(lambda: self._ranks.load(folder))

    async def export(self, folder: Path) -> None:
        await self._restartable.outliving(lambda: self._ranks.export(folder))

    async def sequence_logprobs(self, prompt: Prompt, num_copies: int = 1) -> np.ndarray:
        return await self._restartable.outliving(lambda: self._ranks.sequence_logprobs(prompt, num_copies))

    async def manifest(self) -> Manifest:
        return await self._restartable.outliving(self._ranks.manifest)

    async def open_transfer(self, epoch: int, num_receivers: int) -> Rendezvous:
        rendezvous = await self._restartable.outliving(lambda: self._ranks.open_transfer(epoch, num_receivers))
        self._opened.add(epoch)
        return rendezvous

    async def join_transfer(self, rendezvous: Rendezvous) -> None:
        """A missed deadline does not mean that the learner is lost: it may have waited for a receiver.

        Raises:
            WeightSyncError: the group did not come together, or went with the ranks that had opened it.
        """

        async def join() -> None:
            if rendezvous.epoch not in self._opened:
                raise WeightSyncError(f"transfer epoch {rendezvous.epoch} went with the ranks that had opened it")
            await self._ranks.join_transfer(rendezvous)

        try:
            await self._restartable.outliving(join, is_patient=True)
        except DeadlineError as error:
            raise WeightSyncError(f"transfer epoch {rendezvous.epoch} did not come together: {error}") from error

    async def leave_transfer(self, epoch: int) -> None:
        self._opened.discard(epoch)
        await self._restartable.outliving(lambda: self._ranks.leave_transfer(epoch))

    async def send_weights(self, bucket_bytes: int, epoch: int) -> None:
        await self._restartable.outliving(lambda: self._ranks.send_weights(bucket_bytes, epoch))

    async def export_weights(self, bucket_bytes: int) -> tuple[int, Sequence[Any]]:
        return await self._restartable.outliving(lambda: self._ranks.export_weights(bucket_bytes))

    def recall_with(self, recall: Recall) -> None:
        """Set what returns the lost groups of a trained step; without it, their loss ends the run."""
        self._recall = recall

    async def _bring_back(self, error: Exception) -> None:
        """Bring the ranks back to the version they had.

        Raises:
            NotRestartableError: there is no checkpoint.
        """
        newest = await asyncio.to_thread(self._newest)
        if newest is None:
            raise NotRestartableError(f"the learner was lost before its first checkpoint: {error}") from error
        version, folder = newest
        self._generation += 1
        self._opened.clear()
        await self._ranks.respawn()
        loaded = await self._ranks.load(folder)
        if loaded != version:
            raise CheckpointError(f"{folder} holds version {loaded} instead of {version}")
        for n, (made, groups) in enumerate(self._trained):
            if made > version:
                self._trained[n] = (made, await self._repeat(groups))
                self.num_steps_repeated += 1
        _logger.info(
            "the learner is back at version %d, from the checkpoint of version %d", self._ranks.version, version
        )

    async def _repeat(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        """Repeat a step; returns its groups, some of which may have been recalled."""
        try:
            await self._ranks.update(groups)
        except LostObjectError:
            if self._recall is None:
                raise
            groups = await self._recall(groups)
            await self._ranks.update(groups)
        return groups
