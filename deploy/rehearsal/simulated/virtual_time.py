"""An asyncio event loop whose clock jumps to the next timer: hours of waiting pass in moments, the same every time."""

from __future__ import annotations

import asyncio
import math
import selectors
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

Result = TypeVar("Result")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`time()` is 0 s at first and moves only while every task waits, and then at once to the earliest timer.

    What a task computes takes no time. What it would give to a thread is done on the spot, since a clock that jumps
    while a thread works would run ahead of it. So a program's course depends on its timers alone. A loop in which
    nothing is left to happen raises an error, where a real one would wait for ever.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._ends_at_s = math.inf
        self._on_end: Callable[[], object] | None = None
        super().__init__(_JumpingSelector(self._jump, self._look))

    def time(self) -> float:
        return self._now

    def run_in_executor(  # type: ignore[override]  # a narrower signature than the typeshed's
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def after_wall_s(self, seconds: float, callback: Callable[[], object]) -> None:
        """Calls `callback` once after `seconds` on this machine, whatever the virtual time."""
        self._ends_at_s, self._on_end = time.perf_counter() + seconds, callback

    def _look(self) -> None:
        if self._on_end is not None and time.perf_counter() >= self._ends_at_s:
            self.call_soon(self._on_end)
            self._on_end = None

    def _jump(self, seconds: float) -> None:
        self._now += seconds


def run_virtually(main: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


class _JumpingSelector(selectors.DefaultSelector):
    """Looks at its files without waiting, and has the clock moved by as much as it was to wait."""

    def __init__(self, jump: Callable[[float], None], look: Callable[[], None]) -> None:
        super().__init__()
        self._jump = jump
        self._look = look

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._look()
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("every task waits for another and no timer is set: nothing can happen any more")
        if not ready and timeout is not None and timeout > 0:
            self._jump(timeout)
        return ready
