"""A plain role behind the interface of a Ray handle: calls run in this process, at once or as tasks of its loop."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class LocalReference:
    """What a call returns: its result, sooner or later."""

    task: asyncio.Future[Any]

    def future(self) -> asyncio.Future[Any]:
        return self.task


@dataclass(frozen=True)
class LocalMethod:
    """`handle.method`. As in Ray, several results are taken apart and a single one is left as it is."""

    function: Callable[..., Any]
    streams: list[LocalStream]  # of the handle
    num_returns: int | str = 1

    def options(self, *, num_returns: int | str = 1, concurrency_group: str = "") -> LocalMethod:
        """Here every call has a lane of its own."""
        return replace(self, num_returns=num_returns)

    def remote(self, *args: Any, **named: Any) -> Any:
        if self.num_returns == "streaming":
            self.streams.append(LocalStream(self.function(*args, **named)))
            return self.streams[-1]
        whole = asyncio.ensure_future(self._call(args, named))
        if self.num_returns == 1:
            return LocalReference(whole)
        return [LocalReference(asyncio.ensure_future(self._part(whole, i))) for i in range(self.num_returns)]

    async def _call(self, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        given = {name: await _resolved(value) for name, value in named.items()}
        result = self.function(*[await _resolved(value) for value in args], **given)
        return await result if inspect.isawaitable(result) else result

    async def _part(self, whole: asyncio.Future[Any], index: int) -> Any:
        results = await whole
        assert len(results) == self.num_returns, f"{len(results)} results, {self.num_returns} were asked for"
        return results[index]


async def _resolved(value: Any) -> Any:
    """As in Ray, a reference that is an argument arrives as its value."""
    return await value.task if isinstance(value, LocalReference) else value


class LocalStream:
    """What a call that streams returns. As in Ray, values come as fast as they are made."""

    def __init__(self, values: AsyncIterator[Any]) -> None:
        self._ready: deque[LocalReference] = deque()
        self._has_messages = asyncio.Event()
        self._making = asyncio.ensure_future(self._make(values))
        self._death: Exception | None = None

    def die(self, error: Exception) -> None:
        """The process that makes the values dies of `error`; the values made before have been sent."""
        self._death = error
        self._making.cancel()

    def __aiter__(self) -> LocalStream:
        return self

    async def __anext__(self) -> LocalReference:
        while not self._ready and not self._making.done():
            self._has_messages.clear()
            await self._has_messages.wait()
        if self._ready:
            return self._ready.popleft()
        if self._death is not None:
            raise self._death
        await self._making
        raise StopAsyncIteration

    def __next__(self) -> LocalReference:
        return self._ready.popleft()

    def next_ready(self) -> bool:
        return bool(self._ready)

    def completed(self) -> LocalReference:
        return LocalReference(self._making)

    async def _make(self, values: AsyncIterator[Any]) -> None:
        try:
            async for value in values:
                found = asyncio.get_running_loop().create_future()
                found.set_result(value)
                self._ready.append(LocalReference(found))
                self._has_messages.set()
        finally:
            self._has_messages.set()


class LocalHandle:
    """The handle of `role`."""

    def __init__(self, role: Any) -> None:
        self._role = role
        self._streams: list[LocalStream] = []

    def __getattr__(self, name: str) -> LocalMethod:
        return LocalMethod(getattr(self._role, name), self._streams)

    def die(self, error: Exception) -> None:
        """Every stream of the role ends with `error`, after what was sent."""
        for stream in self._streams:
            stream.die(error)


async def never(*args: Any) -> None:
    """A call that is not answered."""
    await asyncio.Event().wait()
