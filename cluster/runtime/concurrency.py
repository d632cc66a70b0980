"""Concurrency in one call: several coroutines side by side, one while it makes progress, or work on a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any

from mobula.cluster.errors import DeadlineError


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
        # Kept, so that `renew` can put it off.
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
        # A cancellation is no outcome of a call: it has to reach the caller.
        if isinstance(outcome, BaseException) and not isinstance(outcome, Exception):
            raise outcome
    return list(found)


class DaemonThread(Executor):
    """Runs one job after the other, in order, on one thread that does not keep the process from ending.

    A `ThreadPoolExecutor` is waited for when the interpreter ends, also for a job that hangs.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.put((future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """The thread ends after the jobs that are queued; it is not waited for."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (entry := self._jobs.get()) is not None:
            future, job = entry
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(job())
            except BaseException as error:  # the caller gets it
                future.set_exception(error)
