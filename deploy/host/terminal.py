"""Terminal and signals of a command."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from mobula.cluster.failures import escaped

_logger = logging.getLogger(__name__)


def ending_signals() -> tuple[signal.Signals, ...]:
    """Returns the signals besides SIGINT that end a run in order, without those that the parent process ignores."""
    candidates = (signal.SIGTERM, signal.SIGHUP)
    return tuple(number for number in candidates if signal.getsignal(number) is not signal.SIG_IGN)


@contextmanager
def signals_raise() -> Iterator[None]:
    """Makes the ending signals raise KeyboardInterrupt in the body, so that context managers and `finally` blocks run;
    restores the earlier handlers, also that of SIGINT."""
    if threading.current_thread() is not threading.main_thread():  # Python handles signals in the main thread alone
        yield
        return
    before = {number: signal.signal(number, _interrupt) for number in ending_signals()}
    before[signal.SIGINT] = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_signals() -> None:
    """Ignores the ending signals while the process closes its resources. Call it in `signals_raise`."""
    for number in (signal.SIGINT, *ending_signals()):
        signal.signal(number, signal.SIG_IGN)


async def until_signal(work: Coroutine[Any, Any, Any], is_handled: Callable[[], bool] = lambda: False) -> Any:
    """Runs `work`. SIGINT, SIGTERM and SIGHUP cancel it, unless `is_handled()` returns True: `work` ends then.
    Afterwards signals are ignored while summary and report are written.

    `ray job stop` sends SIGTERM, and SIGKILL 3 s later (RAY_JOB_STOP_WAIT_TIME_S).
    """
    import asyncio  # slow import, which `--help` does not need

    task, has_hung_up = asyncio.ensure_future(work), False

    def stop(number: int) -> None:
        nonlocal has_hung_up
        if number == signal.SIGHUP:  # a closing terminal sends it twice, through the kernel and through the shell
            if has_hung_up:
                return
            has_hung_up = True
        if not is_handled():
            task.cancel()

    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, *ending_signals())
    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
        ignore_signals()  # the loop's end would restore defaults, and a late signal cost summary and cluster


@contextmanager
def sigterm_stays_ours() -> Iterator[None]:
    """Restores this module's SIGTERM handler after the body: Ray replaces it when it starts and when it ends."""
    before = signal.getsignal(signal.SIGTERM)
    is_ours = before in (signal.SIG_IGN, _interrupt) and threading.current_thread() is threading.main_thread()
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class PlainConsole(Console):
    """Every command prints through it. Text cannot style or link itself, and its control characters are escaped: a
    response, a name or a record of a foreign run cannot write to the clipboard, the title or other lines."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        # The text of every renderable passes here, before Rich adds its own escape sequences. Controls are Rich's own.
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escaped(segment.text), segment.style)


def terminal(*, stderr: bool = False, soft_wrap: bool = False) -> Console:
    """Returns a console for text of any origin; `soft_wrap` keeps long lines whole for other programs."""
    return PlainConsole(stderr=stderr, soft_wrap=soft_wrap)


def open_missing_streams() -> None:
    """Connects closed stdin, stdout and stderr (`>&-`) to /dev/null.

    Otherwise the next opened file would get the descriptor, and with it the output of libraries and child processes.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest free number
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))


def write_any_text() -> None:
    """Escapes characters that the encoding of stdout or stderr lacks, for example under LC_ALL=C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def outlive_output(*names: str) -> None:
    """Continues without stdout or stderr (or the named stream) after a write error: closed pipe, full disk, closed
    terminal. Do not call it for results on stdout, which must not be lost silently."""
    for name in names or ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Dispensable):
            setattr(sys, name, _Dispensable(stream, name))


class _Dispensable:
    """A text stream that is replaced by /dev/null at the first error, which is logged once."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._stream, attribute)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def writelines(self, lines: list[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Redirects the descriptor, so that libraries and the flush at exit continue too."""
        descriptor = self._stream.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)
        with suppress(OSError):
            self._stream.flush()
        message = f"{self._name} is lost ({error.strerror}): the run goes on without it"
        # In a thread: this one holds the console's lock just now, and another thread may hold a log file's.
        log = partial(_logger.warning, message, extra={"file_only": True})
        threading.Thread(target=log, name="lost output").start()
