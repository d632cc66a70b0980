"""ChildProcess: runs functions in a separate process, which is killed when a call misses its deadline."""

from __future__ import annotations

import math
import os
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, ParamSpec, Self, TypeVar

from mobula.cluster.errors import DeadlineError, MobulaError, WorkerDiedError

P = ParamSpec("P")
T = TypeVar("T")
OWN_COMMAND = (sys.executable, "-P", "-m", "mobula.cluster.runtime.child_process")
GRACE_S = 2.0  # after the deadline: the parent kills first, and the kernel if the parent is gone


class RaisedError(MobulaError):
    """A function raised something other than a `MobulaError` in the child; the message is its type and text."""


class ChildProcess:
    """Runs importable functions in another process, one at a time and in order.

    The process is a fresh interpreter, not a fork: the parent may have threads, an event loop or a GPU. It starts at
    the first call, and again after `close`. It leads a process group, which is killed as a whole. Its standard output
    goes to standard error (with `is_silent` both are discarded), so that prints do not reach the protocol or the
    parent's output. It exits when the parent closes the pipe or dies; a call that hangs then is killed soon after its
    deadline.

    Example:
        with ChildProcess() as child:
            child.call(5.0, math.factorial, 5)  # 120
    """

    def __init__(
        self,
        *,
        env: Mapping[str, str] | None = None,
        memory_limit_bytes: int = -1,
        is_silent: bool = False,
        command: Sequence[str] = OWN_COMMAND,
    ) -> None:
        """`env` extends the environment. `memory_limit_bytes` limits the data segment (-1: no limit). `command` may be
        another program that answers as `serve` does. Its last arguments are the number of the pipe and the limit."""
        self._env = env or {}
        self._command = command
        self._memory_limit_bytes = memory_limit_bytes
        self._is_silent = is_silent
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_running(self) -> bool:
        """Whether a process was started and not closed; it may have died."""
        return self._process is not None

    def call(self, timeout_s: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns the result of `function(*args, **kwargs)`. Function, arguments and result are pickled."""
        self.send(timeout_s, function, *args, **kwargs)
        try:
            succeeded, result = self._reply(timeout_s)
        except BaseException:
            self.close()  # a late reply must not answer the next call
            raise
        return self._opened(succeeded, result)

    def send(self, timeout_s: float, function: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> None:
        """Starts a call without waiting for its reply. Raises the errors of `call` that concern sending."""
        payload = ForkingPickler.dumps((function, args, kwargs))
        connection = self._connection or self._start()
        try:
            connection.send((timeout_s, bytes(payload)))
        except OSError as error:
            raise self._died() from error

    def receive(self, timeout_s: float) -> Any:
        """Returns the result of the oldest call without a reply. Like `call`, but a late call keeps running."""
        return self._opened(*self._reply(timeout_s))

    def close(self) -> int:
        """Kills the process and its group, and reaps it. Returns its exit code (0 without a process)."""
        self.kill()
        process, self._process = self._process, None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        return 0 if process is None else process.wait()

    def kill(self) -> None:
        """Kills the process and its group. May be called from another thread while a call waits."""
        process = self._process
        if process is not None and process.returncode is None:  # not reaped, so no other process group has its id
            os.killpg(process.pid, signal.SIGKILL)

    def _start(self) -> Connection:
        self._connection, theirs = Pipe()
        with theirs:
            output = subprocess.DEVNULL if self._is_silent else None
            self._process = subprocess.Popen(
                [*self._command, str(theirs.fileno()), str(self._memory_limit_bytes)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **self._env},
            )
        return self._connection

    def _reply(self, timeout_s: float) -> tuple[bool, Any]:
        assert self._connection is not None, "a reply follows a call"
        try:
            if self._connection.poll(None if timeout_s == math.inf else max(0.0, timeout_s)):
                reply: tuple[bool, Any] = self._connection.recv()
                return reply
        except (EOFError, OSError) as error:
            raise self._died() from error
        raise DeadlineError(f"waited {timeout_s:.3g} s for a child process")

    def _opened(self, succeeded: bool, result: Any) -> Any:
        if succeeded:
            return result
        if isinstance(result, MobulaError):
            raise result
        text, trace = result
        error = RaisedError(text)
        error.add_note(f"In the child process:\n{trace}")
        raise error

    def _died(self) -> WorkerDiedError:
        return WorkerDiedError(f"its process died with exit code {self.close()}")


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
