"""Where a run's log lines go: all of them into the run folder, warnings and milestones to the console."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

LOG_FILE = "run.log"
OURS = ("actors", "cluster", "deploy", "learner", "rewards")
NUM_KEPT = 10_000  # lines from before there is a run folder
NEVER = logging.CRITICAL + 1


def set_up_logging(console: Console) -> None:
    """Log to the console, and keep what is logged until `logged_to` names a folder. Call once a run."""
    screen = RichHandler(console=console, show_path=False, show_level=False, markup=False, log_time_format="%H:%M:%S")
    kept = MemoryHandler(NUM_KEPT, flushLevel=NEVER)
    for name in OURS:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.handlers = [kept, screen]
        logger.propagate = False


@contextmanager
def logged_to(folder: Path) -> Iterator[None]:
    """While the body runs, everything is also written to the run's log, first what was kept so far."""
    file = logging.FileHandler(folder / LOG_FILE, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in OURS]
    for kept in {handler for logger in loggers for handler in logger.handlers if isinstance(handler, MemoryHandler)}:
        kept.setTarget(file)
        kept.close()  # flushes
        for logger in loggers:
            logger.removeHandler(kept)
    for logger in loggers:
        logger.addHandler(file)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(file)
        file.close()
