"""Supervisor: watches every role while the run lasts and closes all of them at its end.

For now a role that died ends the run with an error that names it; it is not started again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from cluster.errors import WorkerDiedError

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Watched:
    """One role's process as the supervisor sees it.

    `ping` returns while the process is alive, however busy: where it is an actor, the method runs in a concurrency
    group of its own. `close` ends it in good order within a deadline of its own.
    """

    name: str
    ping: Callable[[], Awaitable[None]]
    close: Callable[[], Awaitable[None]]


class Supervisor:
    """Pings each role every `interval_s` and waits `deadline_s` for the answer."""

    def __init__(self, roles: Sequence[Watched], *, interval_s: float, deadline_s: float) -> None:
        """`roles` in the order in which they were started."""
        self._roles = list(roles)
        self._interval_s = interval_s
        self._deadline_s = deadline_s

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch while the body runs, then close all roles.

        Raises:
            WorkerDiedError: a role died or did not answer; the body was cancelled.
        """
        try:
            async with background_tasks() as tasks:
                for role in self._roles:
                    tasks.create_task(self._watch(role), name=f"watch {role.name}")
                yield
        finally:
            await self.close()

    async def close(self) -> None:
        """Close every role, the last started first; one that fails is logged and does not keep the others open."""
        while self._roles:
            role = self._roles.pop()
            try:
                await role.close()
            except Exception:  # the run is over: its result or its error matters more
                _logger.warning("%s did not close in good order", role.name, exc_info=True)

    async def _watch(self, role: Watched) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                async with asyncio.timeout(self._deadline_s):
                    await role.ping()
            except TimeoutError as error:
                raise WorkerDiedError(f"{role.name} did not answer a ping within {self._deadline_s:g} s") from error
            except Exception as error:
                raise WorkerDiedError(f"{role.name} died: {error}") from error


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
            raise _BodyEnded
    except BaseExceptionGroup as failures:
        _, others = failures.split(_BodyEnded)
        if others is not None:
            first, *rest = others.exceptions
            for other in rest:
                first.add_note(f"also failed: {other!r}")
            raise first from first.__cause__
