"""The child's end of `ChildProcess`: answers calls on a pipe until the parent closes it."""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from mobula.cluster.errors import MobulaError

GRACE_S = 2.0  # after the deadline: the parent kills first, and the kernel if the parent is gone


def serve(connection: Connection) -> None:
    """Answers `(timeout_s, pickled (function, args, kwargs))` with `(succeeded, result or error)`."""
    owner = os.getpid()
    while True:
        try:
            timeout_s, payload = connection.recv()
        except EOFError:  # the parent closed its end or died
            return
        if timeout_s != math.inf:  # unhandled SIGALRM ends even a hang inside C code
            signal.setitimer(signal.ITIMER_REAL, timeout_s + GRACE_S)
        reply = _run(payload)
        if os.getpid() != owner:
            os._exit(0)  # a fork that returned from the function: its reply would answer the next call
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            connection.send_bytes(reply)
        except (BrokenPipeError, ConnectionResetError):
            return  # the parent does not wait for the reply any more


def _run(payload: bytes) -> Any:
    """Runs a call and returns the pickled reply."""
    try:
        function, args, kwargs = ForkingPickler.loads(payload)  # imports modules: the function's and the arguments'
        return ForkingPickler.dumps((True, function(*args, **kwargs)))
    except MobulaError as error:
        try:
            return ForkingPickler.dumps((False, error))
        except Exception:
            return _text_of(error)
    except BaseException as error:  # a sys.exit() inside the function is a failed call, too
        return _text_of(error)


def _text_of(error: BaseException) -> Any:
    return ForkingPickler.dumps((False, (f"{type(error).__name__}: {error}", traceback.format_exc())))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    os.dup2(2, 1)  # prints go to the log
    fileno, memory_limit_bytes = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_DATA, (memory_limit_bytes, memory_limit_bytes))
    serve(Connection(fileno))
