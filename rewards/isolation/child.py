"""Functions that `IsolatedProcess` runs in its child process: import a target, or call it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

from mobula.cluster import user_code
from mobula.rewards.contract import portable

Reply = tuple[bool, Any]
"""(whether the call succeeded, its result or the text of its error)."""


def load(target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reply:
    """Imports the target's module. Unpickling has already imported the modules of the arguments' classes."""
    return _settled(lambda: user_code.load(target) and None)


def call(target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reply:
    """Calls the target, awaits a coroutine, and converts the result to plain numbers."""
    return _settled(lambda: _result(user_code.load(target)(*args, **kwargs)))


def _settled(work: Callable[[], Any]) -> Reply:
    try:
        return True, work()
    except BaseException as error:  # a sys.exit() in a reward function is a failure of its call, too
        return False, f"{type(error).__name__}: {error}"


def _result(result: Any) -> Any:
    result = _loop().run_until_complete(_awaited(result)) if inspect.isawaitable(result) else result
    return [portable(each) for each in result] if isinstance(result, list) else portable(result)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop of all calls: an HTTP client of a module is bound to the loop of its first call."""
    return asyncio.new_event_loop()


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result
