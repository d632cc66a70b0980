"""Runs coroutines concurrently, waits with a renewable timeout, and runs work on a daemon thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any

from mobula.cluster.errors import DeadlineError


async def run_all(*calls: Coroutine[Any, Any, Any]) -> list[Any]:
    """Returns the results in order. The first failure cancels the rest and is raised itself, not in a group."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(call) for call in calls]
    except* Exception as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__
    return [task.result() for task in running]


class RenewableTimeout:
    """A timeout of `timeout_s` that starts again with every sign of progress. With `is_held` it starts with the first
    sign: until then the caller waits for other work with its own deadline."""

    def __init__(self, timeout_s: float, *, is_held: bool = False) -> None:
        self.timeout_s = timeout_s
        self._is_held = is_held
        self._deadline: asyncio.Timeout | None = None

    def renew(self) -> None:
        self._is_held = False
        if self._deadline is not None and not self._deadline.expired():
            self._deadline.reschedule(asyncio.get_running_loop().time() + self.timeout_s)

    async def wait_for(self, awaitable: Awaitable[Any], what: str) -> Any:
        """Raises: DeadlineError: the timeout has passed; the message has `what`. Exception: an error of `awaitable`."""
        # Kept in the object, so that `renew` can reschedule it.
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
    """Waits for all calls and returns their results or `Exception`s, in order. Cancelling it cancels all calls."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in results:
        # A cancellation is not an outcome of a call: it must reach the caller.
        if isinstance(outcome, BaseException) and not isinstance(outcome, Exception):
            raise outcome
    return list(results)


class DaemonThread(Executor):
    """Runs jobs in order on one daemon thread. The interpreter waits at exit for the jobs of a `ThreadPoolExecutor`,
    even if one hangs; not for this thread."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.put((future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the thread after the queued jobs, without waiting."""
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
