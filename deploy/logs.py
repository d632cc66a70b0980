"""Where a run's log lines go: all of them into the run folder, warnings and milestones to the console."""

from __future__ import annotations

import logging
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

LOG_FILE = "run.log"
OURS = ("actors", "cluster", "deploy", "learner", "rewards")


def set_up_logging(folder: Path, console: Console) -> None:
    """Call once a process, when the run folder is there."""
    file = logging.FileHandler(folder / LOG_FILE, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    screen = RichHandler(console=console, show_path=False, show_level=False, markup=False, log_time_format="%H:%M:%S")
    for name in OURS:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.handlers = [file, screen]
        logger.propagate = False
