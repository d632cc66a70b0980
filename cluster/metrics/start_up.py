"""StartUp: seconds of each phase between the start of a run and its first sampled response."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

_logger = logging.getLogger(__name__)

FIRST_RESPONSE = "first response"
TOTAL = "total"


class StartUp:
    """Phases that run side by side (engines, learner, scorers) each count from the same moment.

    `clock` is monotonic, in seconds; `begun` is the start of the run on it.
    """

    def __init__(self, begun: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}  # by phase, in the order of their ends
        self._clock = clock
        self._begun = begun
        self._last = begun  # end of the newest phase

    def ended(self, phase: str, seconds: float | None = None) -> None:
        """Records the first end of `phase`, by default begun at the end of the phase before."""
        now = self._clock()
        self.seconds.setdefault(phase, now - self._last if seconds is None else seconds)
        self._last = now

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Measures the body as `phase` if it succeeds."""
        start = self._clock()
        yield
        self.ended(phase, self._clock() - start)

    async def timing(self, phase: str, work: Coroutine[Any, Any, T]) -> T:
        """Awaits `work`, measured as `phase`, and returns its result."""
        with self.timed(phase):
            return await work

    def responded(self) -> None:
        """Records the first response; later calls have no effect."""
        if TOTAL in self.seconds:
            return
        self.ended(FIRST_RESPONSE)
        self.seconds[TOTAL] = self._clock() - self._begun
        phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self.seconds.items() if phase != TOTAL)
        _logger.info("first response after %.1f s: %s", self.seconds[TOTAL], phases)
