"""Supervisor: watches every role while the run lasts and closes all of them at its end.

A role that cannot be replaced ends the run when it dies, with an error that names it. For one that can,
`on_lost` is called and its owner replaces it. Roles with many interchangeable workers check them in their own pools.
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
    """One role's process as the supervisor sees it.

    `ping` returns while the process is alive, however busy: where it is an actor, the method runs in a concurrency
    group of its own. `close` ends it cleanly within a deadline of its own. `on_lost` is called for every ping
    that fails, also again for a loss that is not repaired yet: with a DeadlineError where there was no answer, with a
    WorkerDiedError where the process is gone.
    """

    name: str
    ping: Callable[[], Awaitable[None]]
    close: Callable[[], Awaitable[None]]
    on_lost: Callable[[Exception], None] | None = None  # None: the run ends


def watched_pool(name: str, check: Callable[[], Awaitable[None]], close: Callable[[], Awaitable[None]]) -> Watched:
    """A pool that replaces its own workers: `check` asks each of them, within deadlines of its own.

    So a check that is late as a whole is the driver's delay, and ends nothing.
    """

    def on_lost(error: Exception) -> None:
        if not isinstance(error, DeadlineError):
            raise error
        _logger.warning("the driver is short of time: %s", error)

    return Watched(name, check, close, on_lost)


class Pool(Protocol):
    """Interchangeable workers that look after themselves."""

    def tended(self) -> AbstractAsyncContextManager[None]:
        """Replace lost workers while the body runs."""
        ...

    async def close(self) -> None: ...


class Supervisor:
    """Pings each role every `interval_s` and waits `deadline_s` for the answer; lets each pool tend its workers."""

    def __init__(
        self, roles: Sequence[Watched], pools: Sequence[Pool] = (), *, interval_s: float, deadline_s: float
    ) -> None:
        """`roles` in the order in which they were started."""
        self._roles = list(roles)
        self._pools = list(pools)
        self._interval_s = interval_s
        self._deadline_s = deadline_s

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch while the body runs, then close all pools and roles.

        Raises:
            WorkerDiedError: a role died or did not answer; the body was cancelled.
        """
        try:
            async with AsyncExitStack() as tended:
                for pool in self._pools:
                    await tended.enter_async_context(pool.tended())
                tasks = await tended.enter_async_context(background_tasks())
                for role in self._roles:
                    tasks.create_task(self._watch(role), name=f"watch {role.name}")
                yield
        finally:
            # In `finally`: processes of a run that failed have to end as well.
            await self.close()

    async def close(self) -> None:
        """Close every pool, then every role, the last started first; one that fails keeps no other open."""
        while self._pools:
            await self._close(self._pools.pop().close, "a pool")
        while self._roles:
            role = self._roles.pop()
            await self._close(role.close, role.name)

    async def _close(self, close: Callable[[], Awaitable[None]], name: str) -> None:
        try:
            await close()
        except Exception:  # the run is over: its result or its error matters more
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
    """Ends a task group whose body is done."""


@asynccontextmanager
async def background_tasks() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group whose tasks live as long as the body: they are cancelled at its end, and the first one that fails
    cancels it.

    A failure travels as itself, so that callers catch it by its type; others of the same moment are its notes.
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
