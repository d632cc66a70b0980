"""StopRequest: stops a run with a checkpoint of its newest version, within a deadline."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from mobula.cluster.errors import RunStopped
from mobula.cluster.workers.status import Progress

_logger = logging.getLogger(__name__)

_PHASES = {"reference": "reference log-probs", "weight_sync": "weight sync", "other": "end"}


class StopRequest:
    """Asks the loop to stop. The first request cancels a wait for rollouts, or lets the current step end; the loop then
    writes a checkpoint. A second request or the deadline ends the run without a checkpoint."""

    def __init__(self, *, deadline_s: float, progress: Callable[[], Progress]) -> None:
        """`deadline_s` bounds the time from the request to the complete checkpoint. `progress()` returns the phase of
        the loop, for the log."""
        self._deadline_s = deadline_s
        self._progress = progress
        self._is_requested = False
        self._is_saving = False
        self._deadline: asyncio.Timeout | None = None  # while the loop runs
        self._wait: asyncio.Timeout | None = None  # while the loop runs a body that may be cancelled

    def request(self) -> bool:
        """Asks the run to stop. Returns False if no loop runs or at a second request: the caller has to cancel it."""
        if self._deadline is None:
            return False
        if self._is_requested:
            _logger.warning("stopping at once, without a checkpoint: was waiting for %s", self._awaited())
            return False
        self._is_requested, now = True, asyncio.get_running_loop().time()
        self._deadline.reschedule(now + self._deadline_s)
        if self._wait is None:
            _logger.warning(
                "stopping: waiting for %s, then for a checkpoint; ask again to stop at once", self._awaited()
            )
        else:
            self._wait.reschedule(now)
            _logger.warning("stopping: waiting for a checkpoint; ask again to stop at once")
        return True

    @asynccontextmanager
    async def accepting_requests(self) -> AsyncIterator[None]:
        """Accepts requests while the body runs: the loop and its last checkpoint."""
        # No deadline yet: `request` reschedules this timeout.
        deadline = asyncio.timeout(None)
        try:
            async with deadline:
                self._deadline = deadline
                yield
        except TimeoutError as error:
            # Do not handle a TimeoutError that the body raised.
            if not deadline.expired():
                raise
            _logger.warning(
                "stopping without a checkpoint: waited %g s for %s (timeouts.stop_checkpoint_s)",
                self._deadline_s,
                self._awaited(),
            )
            raise RunStopped from error
        finally:
            self._deadline = None

    @asynccontextmanager
    async def interruptible(self) -> AsyncIterator[None]:
        """Cancels the body at a request. After a request the body does not run."""
        if self._is_requested:
            self._is_saving = True
            raise RunStopped
        wait = asyncio.timeout(None)
        try:
            async with wait:
                self._wait = wait
                yield
        except TimeoutError as error:
            if not wait.expired():
                raise
            self._is_saving = True
            raise RunStopped from error
        finally:
            self._wait = None

    def _awaited(self) -> str:
        if self._is_saving:
            return "the checkpoint"
        progress = self._progress()
        return f"the {_PHASES.get(progress.phase, progress.phase)} of step {progress.step}"
