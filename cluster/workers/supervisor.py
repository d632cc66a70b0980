"""Supervisor: watches every role during the run and closes all roles at its end.

A role that cannot be replaced ends the run when it dies, with an error that names it. For other roles `on_lost` is
called, and the owner replaces them. Pools check their own workers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from mobula.cluster.errors import DeadlineError, WorkerDiedError

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Watched:
    """One role's process.

    `ping` returns while the process is alive, even if it is busy: in an actor it runs in a separate concurrency group.
    `close` ends the process cleanly and has a separate deadline. `on_lost` is called for every failed ping, possibly
    several times for one loss: with a DeadlineError without an answer, with a WorkerDiedError if the process is gone.
    """

    name: str
    ping: Callable[[], Awaitable[None]]
    close: Callable[[], Awaitable[None]]
    on_lost: Callable[[Exception], None] | None = None  # None: the run ends


def watched_pool(name: str, check: Callable[[], Awaitable[None]], close: Callable[[], Awaitable[None]]) -> Watched:
    """Watches a pool that replaces its own workers. `check` pings each worker with its own deadlines. So a late `check`
    means a slow driver. It is logged and does not end the run."""

    def on_lost(error: Exception) -> None:
        if not isinstance(error, DeadlineError):
            raise error
        _logger.warning("the driver is short of time: %s", error)

    return Watched(name, check, close, on_lost)


class Pool(Protocol):
    """Interchangeable workers that check and replace themselves."""

    def tended(self) -> AbstractAsyncContextManager[None]:
        """Replaces lost workers while the body runs."""

    async def close(self) -> None: ...


class Supervisor:
    """Pings each role every `interval_s` and waits `deadline_s` for the answer. Pools check their own workers."""

    def __init__(
        self, roles: Sequence[Watched], pools: Sequence[Pool] = (), *, interval_s: float, deadline_s: float
    ) -> None:
        """`roles` are in the order of their start."""
        self._roles = list(roles)
        self._pools = list(pools)
        self._interval_s = interval_s
        self._deadline_s = deadline_s

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watches while the body runs, then closes all pools and roles."""
        try:
            async with AsyncExitStack() as tended:
                for pool in self._pools:
                    await tended.enter_async_context(pool.tended())
                tasks = await tended.enter_async_context(background_tasks())
                for role in self._roles:
                    tasks.create_task(self._watch(role), name=f"watch {role.name}")
                yield
        finally:
            # In `finally`: the processes of a failed run must end as well.
            await self.close()

    async def close(self) -> None:
        """Closes every pool, then every role, in reverse order of start. Errors are logged and the rest is closed."""
        while self._pools:
            await self._close(self._pools.pop().close, "a pool")
        while self._roles:
            role = self._roles.pop()
            await self._close(role.close, role.name)

    async def _close(self, close: Callable[[], Awaitable[None]], name: str) -> None:
        try:
            await close()
        except Exception:  # must not replace the result or the error of the run
            _logger.warning("%s did not close cleanly", name, exc_info=True)

    async def _watch(self, role: Watched) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                async with asyncio.timeout(self._deadline_s):
                    await role.ping()
            except TimeoutError as error:
                self._lost(
                    role, DeadlineError(f"{role.name} did not answer a ping within {self._deadline_s:g} s"), error
                )
            except Exception as error:
                self._lost(role, WorkerDiedError(f"{role.name} died: {error}"), error)

    def _lost(self, role: Watched, lost: Exception, cause: Exception) -> None:
        if role.on_lost is None:
            raise WorkerDiedError(str(lost)) from cause
        role.on_lost(lost)


class _BodyEnded(Exception):
    """Raised inside a task group to cancel its tasks after the body."""


@asynccontextmanager
async def background_tasks() -> AsyncIterator[asyncio.TaskGroup]:
    """Yields a task group whose tasks are cancelled at the end of the body. The first failure cancels the body.

    The first failure is raised itself, not in an ExceptionGroup, so that callers catch it by type; further failures
    are added as notes.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
            # An exception is the way to cancel a TaskGroup from inside.
            raise _BodyEnded
    except BaseExceptionGroup as failures:
        _, others = failures.split(_BodyEnded)
        if others is not None:
            first, *rest = others.exceptions
            for other in rest:
                first.add_note(f"also failed: {other!r}")
            raise first from first.__cause__
