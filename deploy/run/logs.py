"""Logging of a run: the console shows the milestones, `run.log` keeps everything.

An event is one line on the console, however long; what follows the first line of a warning or an error, such as a
traceback, is in `run.log` alone.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from logging.handlers import MemoryHandler
from pathlib import Path

from rich.console import Console

from mobula.cluster.failures import COLOUR, escaped
from mobula.cluster.workers import faults
from mobula.cluster.workers.status import Progress

LOG_FILE = "run.log"
OURS = "mobula"
NUM_KEPT = 10_000  # lines from before there is a run folder
NEVER = logging.CRITICAL + 1
_logger = logging.getLogger(__name__)


class PlainFormatter(logging.Formatter):
    """Strips the colours from errors of libraries, and escapes other control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return escaped(COLOUR.sub("", super().format(record)))


class RunLogHandler(logging.FileHandler):
    """Appends to a log of the run. Warns once on the console if records cannot be written."""

    is_failing = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self.is_failing:
            self.is_failing = True
            _logger.warning("%s cannot be written (%s): lines are missing in it", self.baseFilename, sys.exception())


class ConsoleHandler(logging.Handler):
    """Each record with the time of day: the first line of a warning or an error, all lines of others. Where the console
    is no terminal, every line has the time, and none is broken or coloured."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self.addFilter(lambda record: not hasattr(record, "file_only"))

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if record.levelno >= logging.WARNING:
            line = line.partition("\n")[0]
        if record.exc_info and (error := record.exc_info[1]) is not None:
            line += f" ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        line = COLOUR.sub("", line)
        form = "%H:%M:%S" if self._console.is_terminal else "%Y-%m-%d %H:%M:%S"
        now = time.strftime(form, time.localtime(record.created))
        parts = [line] if self._console.is_terminal else line.splitlines() or [""]
        for part in parts:
            self._console.print(f"{now} {part}", markup=False, highlight=False, soft_wrap=True)


def set_up_logging(console: Console) -> None:
    """Logs to the console, and buffers records until `log_to` sets the folder. Call it once per run."""
    for handler in (*_file_handlers(), *logging.getLogger(faults.__name__).handlers):
        handler.close()
    logging.getLogger(faults.__name__).handlers = []
    early, screen = MemoryHandler(NUM_KEPT, flushLevel=NEVER), ConsoleHandler(console)
    logger = logging.getLogger(OURS)
    logger.setLevel(logging.INFO)
    logger.handlers = [early, screen]
    logger.propagate = False


def log_to(folder: Path) -> None:
    """Writes the buffered and all later records to the run's log."""
    file = RunLogHandler(folder / LOG_FILE, encoding="utf-8")
    file.setFormatter(PlainFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger(OURS)
    for early in [handler for handler in logger.handlers if isinstance(handler, MemoryHandler)]:
        for record in early.buffer:
            file.handle(record)
        early.buffer.clear()
        early.close()
    logger.handlers = [file, *(handler for handler in logger.handlers if not isinstance(handler, MemoryHandler))]


def write_faults_to(
    folder: Path, progress: Callable[[], Progress], on_fault: Callable[[faults.Fault], None] = lambda fault: None
) -> None:
    """Writes each loss of a worker, with step and phase, to `faults.jsonl`; `on_fault` gets it before."""
    logging.getLogger(faults.__name__).handlers = [faults.FaultFile(folder / faults.FAULTS_FILE, progress, on_fault)]


def log_thread_failures() -> None:
    """Logs errors that end threads of libraries, such as trackers."""
    threading.excepthook = lambda args: _logger.warning(
        "thread %s ended with an error",
        args.thread.name if args.thread else "?",
        exc_info=None if args.exc_value is None else (args.exc_type, args.exc_value, args.exc_traceback),
    )


def log_failure(error: BaseException) -> Path | None:
    """Write how the run failed, with its traceback, to the run's log file alone; returns the file, if there is one."""
    files = _file_handlers()
    if not files:
        return None
    _logger.error("the run failed: %s", error, exc_info=error, extra={"file_only": True})
    return Path(files[0].baseFilename)


def _file_handlers() -> list[logging.FileHandler]:
    return [handler for handler in logging.getLogger(OURS).handlers if isinstance(handler, logging.FileHandler)]
