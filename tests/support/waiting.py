"""Waiting in tests: for what is to come true, not for a while, and not for ever."""

from __future__ import annotations

import asyncio
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

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


def is_served(url: str) -> bool:
    """Whether a GET there succeeds."""
    with suppress(OSError), urllib.request.urlopen(url, timeout=5):
        return True
    return False


def wait_until_served(
    url: str, process: subprocess.Popen[Any], deadline_s: float, what: Callable[[], object] = lambda: ""
) -> None:
    """While the process that serves it goes on."""
    wait_until(lambda: is_served(url) or process.poll() is not None, deadline_s, what)
    assert process.poll() is None, what()


def _pauses() -> Iterator[float]:
    """Who waits for long looks less often."""
    pause = SHORTEST_S
    while True:
        yield pause
        pause = min(1.5 * pause, LONGEST_S)
