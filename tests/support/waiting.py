"""Waiting in tests: for what is to come true, not for a while, and not for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

Found = TypeVar("Found")

PATIENCE_S = 60.0  # no measure of speed: what works comes true long before
SHORTEST_S, LONGEST_S = 0.001, 0.1  # between two looks


async def until(condition: Callable[[], Found], deadline_s: float = PATIENCE_S) -> Found:
    """The first true value of `condition`; the loop goes on meanwhile.

    Raises:
        TimeoutError: `deadline_s` have passed.
    """
    pauses = _pauses()
    async with asyncio.timeout(deadline_s):
        while not (found := condition()):
            await asyncio.sleep(next(pauses))
    return found


def wait_until(
    condition: Callable[[], object], deadline_s: float = PATIENCE_S, what: Callable[[], object] = lambda: ""
) -> None:
    """`what()` explains a condition that did not come true in time.

    Raises:
        AssertionError: `deadline_s` have passed.
    """
    pauses, end = _pauses(), time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"waited {deadline_s:g} s: {what()}"
        time.sleep(next(pauses))


def _pauses() -> Iterator[float]:
    """Who waits for long looks less often."""
    pause = SHORTEST_S
    while True:
        yield pause
        pause = min(1.5 * pause, LONGEST_S)
