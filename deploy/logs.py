"""Where a run's log lines go: all of them into the run folder, their first lines to the console as well.

An event is one line on the console, however long: nothing is wrapped, and further lines (a traceback) are in the file.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from rich.console import Console

from cluster import faults

LOG_FILE = "run.log"
OURS = ("actors", "cluster", "deploy", "learner", "rewards")

_logger = logging.getLogger(__name__)


class ConsoleHandler(logging.Handler):
    """The first line of each record, with the time of day."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self.addFilter(lambda record: not hasattr(record, "file_only"))

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage().partition("\n")[0]
        if record.exc_info and (error := record.exc_info[1]) is not None:
            line += f" ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        now = time.strftime("%H:%M:%S", time.localtime(record.created))
        self._console.print(f"{now} {line}", markup=False, highlight=False, soft_wrap=True)


def set_up_logging(folder: Path, console: Console) -> None:
    """Call once a process, when the run folder is there."""
    file = logging.FileHandler(folder / LOG_FILE, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    screen = ConsoleHandler(console)
    for name in OURS:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.handlers = [file, screen]
        logger.propagate = False
    logging.getLogger(faults.__name__).handlers = [faults.FaultFile(folder / faults.FAULTS_FILE)]


def log_failure(error: BaseException) -> Path | None:
    """Write how the run failed, with its traceback, to the run's log file alone; returns the file, if there is one."""
    files = [handler for handler in logging.getLogger("deploy").handlers if isinstance(handler, logging.FileHandler)]
    if not files:
        return None
    _logger.error("the run failed: %s", error, exc_info=error, extra={"file_only": True})
    return Path(files[0].baseFilename)
