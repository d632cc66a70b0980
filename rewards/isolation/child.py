"""The functions that an isolated process runs for `IsolatedProcess`: import a target, or call it."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from mobula.rewards.contract import portable

Reply = tuple[bool, Any]
"""Whether it succeeded, and the result or the text of the error."""


def load(target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reply:
    """Import the target's module; the modules of the arguments' classes were imported to unpickle them."""
    return _settled(lambda: resolve(target) and None)


def call(target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reply:
    """Call the target, wait for the result of an `async def`, and return plain numbers."""
    return _settled(lambda: _result(resolve(target)(*args, **kwargs)))


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


def resolve(target: str) -> Callable[..., Any]:
    """The function that `module:function` or `path/to/file.py:function` names."""
    module, _, name = target.rpartition(":")
    return getattr(_from_file(module) if module.endswith(".py") else importlib.import_module(module), name)


def _from_file(path: str) -> ModuleType:
    """The module in a file, run once; by a name of its own, so that it hides no installed module."""
    name = f"reward_file_{Path(path).resolve().as_posix().encode().hex()}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None, f"{path} ends in .py, so it has a loader"
        folder = str(Path(path).resolve().parent)
        if folder not in sys.path:
            sys.path.append(folder)  # for imports of its siblings; last, so that it hides no installed module
        sys.modules[name] = module = importlib.util.module_from_spec(spec)  # as the import system does: before it runs
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]  # half a module is none
            raise
    return sys.modules[name]
