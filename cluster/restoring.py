"""RestoringLearner: a learner group that outlives its ranks.

The state of a lost rank is gone, and the other ranks cannot go on without it. So all of them are started anew, read the
newest complete checkpoint, and take again the steps that followed it, with the very groups that those steps had: an
update is a function of state and groups, so the weights come out as they were. Then the call that failed is made again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from cluster.errors import CheckpointError, DeadlineError, LostObjectError, WeightSyncError
from cluster.restarts import RestartBudget
from cluster.restoration import BeyondRestoring, Restoration
from cluster.roles import UpdateReport
from cluster.trajectory import Prompt, ScoredGroup
from cluster.weight_sync.manifest import Manifest
from cluster.weight_sync.transport import Rendezvous

_logger = logging.getLogger(__name__)

T = TypeVar("T")
Recall = Callable[[Sequence[ScoredGroup]], Awaitable[Sequence[ScoredGroup]]]


class Ranks(Protocol):
    """The learner group that is restored: `cluster.roles.Learner`, `weight_sync.Sender` and `checkpoints.Durable`."""

    version: int

    async def respawn(self) -> None:
        """End every rank at once and start all of them anew."""
        ...

    async def update(self, groups: Sequence[ScoredGroup]) -> UpdateReport: ...

    async def sequence_logprobs(self, prompt: Prompt) -> np.ndarray: ...

    async def manifest(self) -> Manifest: ...

    async def open_transfer(self, epoch: int, num_receivers: int) -> Rendezvous: ...

    async def join_transfer(self, rendezvous: Rendezvous) -> None: ...

    async def leave_transfer(self, epoch: int) -> None: ...

    async def send_weights(self, bucket_bytes: int, epoch: int) -> None: ...

    async def export_weights(self, bucket_bytes: int) -> tuple[int, Any]: ...

    async def offload(self, part: str) -> None: ...

    async def onload(self) -> None: ...

    async def save(self, folder: Path) -> None: ...

    async def finish_save(self) -> bool: ...

    async def load(self, folder: Path) -> int: ...

    async def export(self, folder: Path) -> None: ...


class RestoringLearner:
    """`ranks`, restored whenever a call finds one of them dead or silent.

    Transfer groups do not survive: a push that was under way ends in a WeightSyncError, and goes out again in a group
    of a new epoch. Before the first checkpoint there is nothing to restore from, and the loss ends the run.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        newest: Callable[[], tuple[int, Path] | None],
        budget: RestartBudget,
        on_lost: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`newest()` gives version and learner folder of the newest complete checkpoint; `on_lost` is told the kind."""
        self._ranks = ranks
        self._newest = newest
        self._furthest = -1  # version that was made
        self._restoration = Restoration(
            "learner",
            self._bring_back,
            budget=budget,
            on_lost=on_lost,
            position=lambda: self._furthest,
            clock=clock,
        )
        self._trained: list[tuple[int, Sequence[ScoredGroup]]] = []  # (version made, groups), since a checkpoint
        self._generation = 0  # of ranks
        self._saved_by = 0  # the generation that has the last copy
        self._opened: set[int] = set()  # transfer epochs of the ranks that are there now
        self._recall: Recall | None = None
        self.num_steps_taken_again = 0

    def lose(self, error: Exception) -> None:
        """Somebody found a rank dead or silent: calls under way end now instead of at their deadline."""
        self._restoration.lose(error)

    async def update(self, groups: Sequence[ScoredGroup]) -> UpdateReport:
        report = await self._outliving(lambda: self._ranks.update(groups))
        self._furthest = report.version
        self._trained.append((report.version, groups))
        return report

    async def offload(self, part: str) -> None:
        await self._outliving(lambda: self._ranks.offload(part))

    async def onload(self) -> None:
        await self._outliving(self._ranks.onload)

    async def save(self, folder: Path) -> None:
        await self._outliving(lambda: self._ranks.save(folder))
        self._saved_by = self._generation
        newest = await asyncio.to_thread(self._newest)
        if newest is not None:  # what it holds need not be taken again; this save is not complete yet
            self._trained = [(version, groups) for version, groups in self._trained if version > newest[0]]

    async def finish_save(self) -> bool:
        """Wait until the last copy is on disk; False if it was lost with the ranks that had it."""
        saved_by = self._saved_by
        return await self._outliving(self._ranks.finish_save) and self._generation == saved_by

    async def load(self, folder: Path) -> int:
        return await self._outliving(lambda: self._ranks.load(folder))

    async def export(self, folder: Path) -> None:
        await self._outliving(lambda: self._ranks.export(folder))

    async def sequence_logprobs(self, prompt: Prompt) -> np.ndarray:
        return await self._outliving(lambda: self._ranks.sequence_logprobs(prompt))

    async def manifest(self) -> Manifest:
        return await self._outliving(self._ranks.manifest)

    async def open_transfer(self, epoch: int, num_receivers: int) -> Rendezvous:
        rendezvous = await self._outliving(lambda: self._ranks.open_transfer(epoch, num_receivers))
        self._opened.add(epoch)
        return rendezvous

    async def join_transfer(self, rendezvous: Rendezvous) -> None:
        """A learner that waits in vain for a receiver is not the one that is lost.

        Raises:
            WeightSyncError: the group did not come together, or went with the ranks that had opened it.
        """

        async def join() -> None:
            if rendezvous.epoch not in self._opened:
                raise WeightSyncError(f"transfer epoch {rendezvous.epoch} went with the ranks that had opened it")
            await self._ranks.join_transfer(rendezvous)

        try:
            await self._restoration.outliving(join, is_patient=True)
        except DeadlineError as error:
            raise WeightSyncError(f"transfer epoch {rendezvous.epoch} did not come together: {error}") from error

    async def leave_transfer(self, epoch: int) -> None:
        self._opened.discard(epoch)
        await self._outliving(lambda: self._ranks.leave_transfer(epoch))

    async def send_weights(self, bucket_bytes: int, epoch: int) -> None:
        await self._outliving(lambda: self._ranks.send_weights(bucket_bytes, epoch))

    async def export_weights(self, bucket_bytes: int) -> tuple[int, Any]:
        return await self._outliving(lambda: self._ranks.export_weights(bucket_bytes))

    def recall_with(self, recall: Recall) -> None:
        """What makes groups of a trained step anew that went with their node; without it their loss ends the run."""
        self._recall = recall

    async def _outliving(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return await self._restoration.outliving(call)

    async def _bring_back(self, error: Exception) -> None:
        """Bring the ranks back to the version they had.

        Raises:
            BeyondRestoring: there is no checkpoint.
        """
        newest = await asyncio.to_thread(self._newest)
        if newest is None:
            raise BeyondRestoring(f"the learner was lost before its first checkpoint: {error}") from error
        version, folder = newest
        self._generation += 1
        self._opened.clear()
        await self._ranks.respawn()
        loaded = await self._ranks.load(folder)
        if loaded != version:
            raise CheckpointError(f"{folder} holds version {loaded} instead of {version}")
        for n, (made, groups) in enumerate(self._trained):
            if made > version:
                self._trained[n] = (made, await self._take_again(groups))
                self.num_steps_taken_again += 1
        _logger.info("the learner is back at version %d, from the checkpoint of %d", self._ranks.version, version)

    async def _take_again(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        """The groups with which the step was taken."""
        try:
            await self._ranks.update(groups)
        except LostObjectError:
            if self._recall is None:
                raise
            groups = await self._recall(groups)
            await self._ranks.update(groups)
        return groups
