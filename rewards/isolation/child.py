"""The far end of `IsolatedProcess`: receives calls on a pipe and answers them until the pipe closes."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from rewards.contract import portable

MEMORY_LIMIT_BYTES = 4 * 2**30  # a power tower in an answer must not push the run's engines out of memory
GRACE_S = 2.0  # the parent kills first; the kernel does when the parent is gone


def serve(connection: Connection) -> None:
    """Answer `(called, target, args, kwargs, timeout_s)` with `(succeeded, result or error text)`.

    A target that is not called is imported only.
    """
    owner = os.getpid()
    while True:
        try:
            called, target, args, kwargs, timeout_s = connection.recv()
        except EOFError:  # the parent closed its end or died
            return
        signal.setitimer(signal.ITIMER_REAL, timeout_s + GRACE_S)  # unhandled SIGALRM ends even a hang inside C code
        reply = _run(called, target, args, kwargs)
        if os.getpid() != owner:
            os._exit(0)  # a fork that returned from the function: its reply would be taken for the next call's
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(connection, reply)


def _run(called: bool, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    try:
        function = resolve(target)
        return True, _settled(function(*args, **kwargs)) if called else None
    except BaseException as error:  # a sys.exit() inside an answer's check is that answer's failure as well
        return False, f"{type(error).__name__}: {error}"


def _settled(result: Any) -> Any:
    """Waits for the result of an `async def`; returns plain numbers."""
    return portable(_loop().run_until_complete(_awaited(result)) if inspect.isawaitable(result) else result)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """One event loop for all calls: a client that a module keeps belongs to the loop of its first call."""
    return asyncio.new_event_loop()


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def _send(connection: Connection, reply: tuple[bool, Any]) -> None:
    try:
        connection.send(reply)
    except (BrokenPipeError, ConnectionResetError):
        raise SystemExit(0) from None  # it is not awaited any more
    except Exception as error:  # pickling runs code of the result's own class
        connection.send((False, f"a result that cannot be pickled, {type(error).__name__}: {error}"))


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


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    serve(Connection(int(sys.argv[1])))
