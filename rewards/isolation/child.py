"""The functions that an isolated process runs for `IsolatedProcess`: import a target, or call it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

from mobula.cluster import user_code
from mobula.rewards.contract import portable

Reply = tuple[bool, Any]
"""Whether it succeeded, and the result or the text of the error."""


def load(target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reply:
    """Import the target's module; the modules of the arguments' classes were imported to unpickle them."""
    return _settled(lambda: user_code.load(target) and None)


def call(target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reply:
    """Call the target, wait for the result of an `async def`, and return plain numbers."""
    return _settled(lambda: _result(user_code.load(target)(*args, **kwargs)))


def _settled(work: Callable[[], Any]) -> Reply:
    try:
        return True, work()
    except BaseException as error:  # a sys.exit() inside an answer's check is that answer's failure as well
        return False, f"{type(error).__name__}: {error}"


def _result(result: Any) -> Any:
    return portable(_loop().run_until_complete(_awaited(result)) if inspect.isawaitable(result) else result)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """One event loop for all calls: a client that a module keeps belongs to the loop of its first call."""
    return asyncio.new_event_loop()


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result
