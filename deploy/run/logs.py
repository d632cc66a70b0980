"""Logging of a run: the console shows the milestones, `run.log` keeps everything.

An event is one line on the console, however long; what follows the first line of a warning or an error, such as a
traceback, is in `run.log` alone.
"""

from __future__ import annotations

import logging
import time
from logging.handlers import MemoryHandler
from pathlib import Path

from rich.console import Console

from cluster.workers import faults

LOG_FILE = "run.log"
OURS = ("actors", "cluster", "deploy", "learner", "rewards")
NUM_KEPT = 10_000  # lines from before there is a run folder
NEVER = logging.CRITICAL + 1

_logger = logging.getLogger(__name__)


class ConsoleHandler(logging.Handler):
    """Each record with the time of day: the first line of a warning or an error, all lines of others."""

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
        now = time.strftime("%H:%M:%S", time.localtime(record.created))
        self._console.print(f"{now} {line}", markup=False, highlight=False, soft_wrap=True)


def set_up_logging(console: Console) -> None:
    """Log to the console, and keep what is logged until `log_to` names a folder. Call once a run."""
    _close(*_file_handlers(), *logging.getLogger(faults.__name__).handlers)
    logging.getLogger(faults.__name__).handlers = []
    kept, screen = MemoryHandler(NUM_KEPT, flushLevel=NEVER), ConsoleHandler(console)
    for name in OURS:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.handlers = [kept, screen]
        logger.propagate = False


def log_to(folder: Path) -> None:
    """From now on everything is also written to the run's log, first what was kept so far."""
    file = logging.FileHandler(folder / LOG_FILE, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for kept in {h for name in OURS for h in logging.getLogger(name).handlers if isinstance(h, MemoryHandler)}:
        kept.setTarget(file)
        kept.close()  # flushes
    for name in OURS:
        logger = logging.getLogger(name)
        logger.handlers = [file, *(h for h in logger.handlers if not isinstance(h, MemoryHandler))]
    logging.getLogger(faults.__name__).handlers = [faults.FaultFile(folder / faults.FAULTS_FILE)]


def log_failure(error: BaseException) -> Path | None:
    """Write how the run failed, with its traceback, to the run's log file alone; returns the file, if there is one."""
    files = _file_handlers()
    if not files:
        return None
    _logger.error("the run failed: %s", error, exc_info=error, extra={"file_only": True})
    return Path(files[0].baseFilename)


def _file_handlers() -> list[logging.FileHandler]:
    return [handler for handler in logging.getLogger("deploy").handlers if isinstance(handler, logging.FileHandler)]


def _close(*handlers: logging.Handler) -> None:
    for handler in handlers:
        handler.close()
