"""A plain role behind the interface of a Ray handle: calls run in this process, at once or as tasks of its loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
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
    num_returns: int | str = 1

    def options(self, *, num_returns: int | str) -> LocalMethod:
        return LocalMethod(self.function, num_returns)

    def remote(self, *args: Any) -> Any:
        if self.num_returns == "streaming":
            return self._stream(args)
        whole = asyncio.ensure_future(self._call(args))
        if self.num_returns == 1:
            return LocalReference(whole)
        return [LocalReference(asyncio.ensure_future(self._part(whole, i))) for i in range(self.num_returns)]

    async def _call(self, args: tuple[Any, ...]) -> Any:
        result = self.function(*args)
        return await result if inspect.isawaitable(result) else result

    async def _stream(self, args: tuple[Any, ...]) -> AsyncIterator[LocalReference]:
        async for item in self.function(*args):
            found = asyncio.get_running_loop().create_future()
            found.set_result(item)
            yield LocalReference(found)

    async def _part(self, whole: asyncio.Future[Any], index: int) -> Any:
        results = await whole
        assert len(results) == self.num_returns, f"{len(results)} results, {self.num_returns} were asked for"
        return results[index]


class LocalHandle:
    """The handle of `role`."""

    def __init__(self, role: Any) -> None:
        self._role = role

    def __getattr__(self, name: str) -> LocalMethod:
        return LocalMethod(getattr(self._role, name))


async def never(*args: Any) -> None:
    """A call that is not answered."""
    await asyncio.Event().wait()
