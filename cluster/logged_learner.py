"""LoggedLearner: a learner whose trained steps go into the trajectory log, behind its updates."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from cluster.errors import MobulaError
from cluster.roles import UpdateReport
from cluster.trajectory import ScoredGroup
from cluster.trajectory_log import TrajectoryLog

_logger = logging.getLogger(__name__)


class DurableLearner(Protocol):
    """`cluster.roles.Learner` and `cluster.checkpoints.Durable`."""

    async def update(self, groups: Sequence[ScoredGroup]) -> UpdateReport: ...

    async def save(self, folder: Path) -> None: ...

    async def finish_save(self) -> bool: ...

    async def load(self, folder: Path) -> int: ...


class LoggedLearner:
    """Writes each step on a thread of its own while the run goes on; beyond `max_waiting` steps the next update waits.

    Steps are in the log before a checkpoint has them, so a run that goes on leaves no gap. A step that cannot be
    written is logged and counted: a record for others is not worth the run.
    """

    def __init__(
        self, learner: DurableLearner, log: TrajectoryLog, *, max_waiting: int, on_failed: Callable[[str], None]
    ) -> None:
        """`on_failed` is told the kind of each failure."""
        self._learner = learner
        self._log = log
        self._max_waiting = max_waiting
        self._on_failed = on_failed
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trajectory-log")
        self._waiting: deque[tuple[int, asyncio.Future[Path]]] = deque()

    async def update(self, groups: Sequence[ScoredGroup]) -> UpdateReport:
        report = await self._learner.update(groups)
        await self._drain(self._max_waiting - 1)
        writing = asyncio.get_running_loop().run_in_executor(self._thread, self._log.append, report.version, groups)
        self._waiting.append((report.version, writing))
        return report

    async def save(self, folder: Path) -> None:
        await self._drain(0)
        await self._learner.save(folder)

    async def finish_save(self) -> bool:
        return await self._learner.finish_save()

    async def load(self, folder: Path) -> int:
        return await self._learner.load(folder)

    async def _drain(self, num_left: int) -> None:
        while len(self._waiting) > num_left:
            version, writing = self._waiting.popleft()
            try:
                await writing
            except (OSError, MobulaError, pa.ArrowException) as error:
                _logger.warning("step %d is missing in the trajectory log: %s", version, error)
                self._on_failed(type(error).__name__)
