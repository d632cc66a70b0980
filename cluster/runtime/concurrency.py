"""Structured concurrency in one call: await several coroutines side by side, or one while it makes progress."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any

from cluster.errors import DeadlineError


async def run_all(*calls: Coroutine[Any, Any, Any]) -> list[Any]:
    """Results in order. The first failure cancels the rest and is raised as itself: callers catch it by type."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(call) for call in calls]
    except* Exception as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__
    return [task.result() for task in running]


class Patience:
    """How long one wait may last: `timeout_s` from its begin, and from every sign of progress.

    One that is held begins with the first sign: until then something else is under way, with a deadline of its own.
    """

    def __init__(self, timeout_s: float, *, is_held: bool = False) -> None:
        self.timeout_s = timeout_s
        self._is_held = is_held
        self._deadline: asyncio.Timeout | None = None

    def renew(self) -> None:
        """There was a sign of progress."""
        self._is_held = False
        if self._deadline is not None and not self._deadline.expired():
            self._deadline.reschedule(asyncio.get_running_loop().time() + self.timeout_s)

    async def wait_for(self, awaitable: Awaitable[Any], what: str) -> Any:
        """Raises: DeadlineError, which names `what`; whatever `awaitable` raises."""
        deadline = self._deadline = asyncio.timeout(None if self._is_held else self.timeout_s)
        try:
            async with deadline:
                return await awaitable
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise DeadlineError(f"waited {self.timeout_s:g} s for {what}") from error
        finally:
            self._deadline = None


async def outcomes(*calls: Coroutine[Any, Any, Any]) -> list[Any]:
    """Results in order, an `Exception` where a call failed; the others are waited for. Cancelling it cancels all."""
    found = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in found:
        if isinstance(outcome, BaseException) and not isinstance(outcome, Exception):
            raise outcome
    return list(found)
