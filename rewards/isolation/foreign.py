"""Calls reward functions in a Python with other packages.

Run as a file by `ChildProcess`, in place of its module: it imports the standard library alone (Python 3.8 or later), so
the environment needs nothing of Mobula. Requests are records with the fields of `RewardRequest`, without its methods.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import io
import os
import pickle
import signal
import sys
from collections.abc import Callable
from functools import lru_cache
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import Any

GRACE_S = 2.0  # as `ChildProcess`
PARAMETERS = "mobula.rewards.functions.plugin:parameters"
FOLDERS = (os.environ.get("MOBULA_COMMAND_FOLDER", ""), "", os.path.abspath(f"{__file__}/../../.."))  # as `file_at`
RESPONSE = ("text", "num_tokens", "is_truncated", "images", "turns", "failure")  # as `Response.__reduce__`


class ForeignRecord:
    """A request, a response or a turn, by the names of its fields."""

    def __init__(self, *values: Any) -> None:
        self.__dict__.update(zip(RESPONSE, values))  # noqa: B905 - an older Python has no `strict`

    def __repr__(self) -> str:
        return repr(self.__dict__)


class Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if not module.startswith("mobula."):
            return super().find_class(module, name)
        return {"load": load, "call": call}.get(name, ForeignRecord)


def load(target: str, args: Any, kwargs: Any) -> tuple[bool, Any]:
    return settled(lambda: function_at(target) and None)


def call(target: str, args: Any, kwargs: Any) -> tuple[bool, Any]:
    return settled(lambda: plain(awaited(function_at(target)(*args, **kwargs))))


def settled(work: Callable[[], Any]) -> tuple[bool, Any]:
    """Returns whether `work` succeeded, and its result or the text of its error."""
    try:
        return True, work()
    except BaseException as error:  # a sys.exit() in a reward function is a failure of its call, too
        return False, f"{type(error).__name__}: {error}"


def function_at(target: str) -> Any:
    if target == PARAMETERS:
        return lambda name: described(function_at(name))
    source, _, name = target.rpartition(":")
    return attrgetter(name)(file_module(source) if source.endswith(".py") else importlib.import_module(source))


@lru_cache(maxsize=None)  # noqa: UP033 - an older Python has no `cache`
def file_module(path: str) -> Any:
    path = next((os.path.join(f, path) for f in FOLDERS if os.path.isfile(os.path.join(f, path))), path)
    sys.path.append(os.path.dirname(os.path.abspath(path)))
    spec = importlib.util.spec_from_file_location("mobula_user_file_" + os.path.basename(path)[:-3], path)
    assert spec is not None and spec.loader is not None, "the name ends with .py"
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def described(function: Any) -> list[tuple[str, str, bool]]:
    """Returns (name, kind, whether it has a default) of each parameter. Raises: TypeError: it is no function."""
    if not callable(function):
        raise TypeError(f"it is a {type(function).__name__}, not a function")
    if inspect.isclass(function):
        raise TypeError("it is a class, not a function: name a function, or an instance that can be called")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError("it yields values: return one number")
    signature = inspect.signature(function)
    return [(p.name, p.kind.name, p.default is not p.empty) for p in signature.parameters.values()]


@lru_cache(maxsize=None)  # noqa: UP033
def loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop of all calls: an HTTP client of a module is bound to the loop of its first call."""
    return asyncio.new_event_loop()


def awaited(result: Any) -> Any:
    async def value() -> Any:
        return await result

    return loop().run_until_complete(value()) if inspect.isawaitable(result) else result


def plain(result: Any) -> Any:
    """Replaces scalars of array libraries by Python numbers, which any process can unpickle."""
    if isinstance(result, dict):
        return {name: plain(part) for name, part in result.items()}
    if isinstance(result, (list, tuple)):
        return [plain(part) for part in result]
    return result.item() if hasattr(result, "item") else result


def serve(connection: Connection) -> None:
    owner = os.getpid()
    while True:
        try:
            timeout_s, payload = connection.recv()
        except EOFError:  # the parent closed its end or died
            return
        if timeout_s != float("inf"):  # unhandled SIGALRM ends even a hang inside C code
            signal.setitimer(signal.ITIMER_REAL, timeout_s + GRACE_S)
        try:
            function, args, kwargs = Unpickler(io.BytesIO(payload)).load()
            reply = pickle.dumps((True, function(*args, **kwargs)), protocol=4)
        except BaseException as error:
            reply = pickle.dumps((False, (f"{type(error).__name__}: {error}", "")), protocol=4)
        if os.getpid() != owner:
            os._exit(0)  # a fork that returned from the function
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            connection.send_bytes(reply)
        except (BrokenPipeError, ConnectionResetError):
            return


if __name__ == "__main__":
    sys.path[0] = FOLDERS[0]  # in place of the folder of this file
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    os.dup2(2, 1)  # prints go to the log
    serve(Connection(int(sys.argv[1])))
