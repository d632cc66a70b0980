"""The far end of an environment process: answers `reset` and `step` on a pipe until the pipe closes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, cast

from actors.environments.base import Demonstrator, Environment, EpisodeError
from actors.environments.registry import build_environment

GRACE_S = 2.0  # the parent kills first; the kernel does when the parent is gone


def serve(connection: Connection) -> None:
    """Answer `(method, arguments, timeout_s)` with `(succeeded, result or (kind of failure, detail))`.

    The first message is `("make", {"name": ..., "options": ...}, timeout_s)`, answered with the spec.
    """
    environment: Environment | None = None
    owner = os.getpid()
    while True:
        try:
            method, arguments, timeout_s = connection.recv()
        except EOFError:  # the parent closed its end or died
            return
        signal.setitimer(signal.ITIMER_REAL, timeout_s + GRACE_S)  # unhandled SIGALRM ends a hang inside C code
        try:
            if method == "make":
                environment = build_environment(**arguments)
                reply = (True, environment.spec)
            else:
                assert environment is not None, "the first message is `make`"
                reply = (True, _call(environment, method, arguments))
        except EpisodeError as error:
            reply = (False, (error.kind, str(error)))
        except BaseException as error:  # a sys.exit() of an environment is a failure of its episode as well
            reply = (False, ("raised", f"{type(error).__name__}: {error}"))
        if os.getpid() != owner:
            os._exit(0)  # a fork that returned from the environment: its reply would be taken for the next call's
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(connection, reply)


def _call(environment: Environment, method: str, arguments: Mapping[str, Any]) -> Any:
    match method:
        case "reset":
            return environment.reset(**arguments)
        case "step":
            return environment.step(**arguments)
        case "demonstrate":
            return cast("Demonstrator", environment).demonstrate()
    raise ValueError(f"{method} is no method of an environment")


def _send(connection: Connection, reply: tuple[bool, Any]) -> None:
    try:
        connection.send(reply)
    except (BrokenPipeError, ConnectionResetError):
        raise SystemExit(0) from None  # it is not awaited any more
    except Exception as error:  # pickling runs code of the result's own class
        detail = f"a result that cannot be pickled, {type(error).__name__}: {error}"
        connection.send((False, ("raised", detail)))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    pipe = Connection(int(sys.argv[1]))
    os.dup2(2, 1)  # what an environment prints goes to the log
    serve(pipe)
