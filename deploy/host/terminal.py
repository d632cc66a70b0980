"""The terminal that commands print to: what a user, a model or a machine wrote comes out as it was written."""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
from contextlib import suppress
from functools import partial
from typing import Any, TextIO

from rich.console import Console

_logger = logging.getLogger(__name__)


def terminal(*, stderr: bool = False, soft_wrap: bool = False) -> Console:
    """A console on which `:b:` stays `:b:`; with `soft_wrap` lines are as long as they are, to be read again."""
    return Console(stderr=stderr, soft_wrap=soft_wrap, emoji=False)


def open_missing_streams() -> None:
    """Connect stdin, stdout and stderr to /dev/null where they are closed, as after `>&-`.

    Another file would get the number, and with it what libraries and child processes print.
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
    """From now on letters that the locale of stdout or stderr lacks, such as those of LC_ALL=C, are escaped."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def outlive_output(*names: str) -> None:
    """From now on this process goes on when its stdout or stderr, or the one that is named, is lost: a closed pipe, a
    full disk, a terminal that is gone. Call it where they only inform: a result on stdout must not be lost silently.
    """
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
        """Everything that shares the descriptor goes on, too: libraries, and the flush at the end of the process."""
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
