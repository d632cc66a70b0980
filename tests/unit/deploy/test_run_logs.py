"""The log of a run: one line an event, without colours, as text and as JSON."""

from __future__ import annotations

import io
import logging
import re
import threading
from pathlib import Path

import pytest
from rich.console import Console

from mobula.deploy.run.logs import LOG_FILE, log_thread_failures, log_to, set_up_logging

RED = "\x1b[31mboom\x1b[0m"


def logged(folder: Path, console: Console) -> None:
    set_up_logging(console)
    logger = logging.getLogger("mobula.deploy.anything")
    logger.info("before there is a folder")
    log_to(folder)
    logger.info("two\nlines")
    try:
        raise ValueError(RED)
    except ValueError:
        logger.warning("failed: %s", RED, exc_info=True)


def test_off_a_terminal_every_line_has_its_time_and_none_is_broken_or_coloured(
    tmp_path: Path, restored_logging: None
) -> None:
    screen = io.StringIO()
    logged(tmp_path, Console(file=screen, width=20))
    lines = screen.getvalue().splitlines()
    assert [line[20:] for line in lines] == [
        "before there is a folder",
        "two",
        "lines",
        "failed: boom (ValueError: boom)",
    ]
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in lines)


def test_the_file_holds_no_colours_and_tracebacks(tmp_path: Path, restored_logging: None) -> None:
    logged(tmp_path, Console(file=io.StringIO()))
    text = (tmp_path / LOG_FILE).read_text(encoding="utf-8")
    assert "\x1b" not in text and "Traceback" in text and "ValueError: boom" in text


def test_a_log_that_cannot_be_written_is_named_once_and_costs_its_lines_alone(
    tmp_path: Path, restored_logging: None, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = io.StringIO()
    set_up_logging(Console(file=screen))
    (tmp_path / LOG_FILE).symlink_to("/dev/full")
    log_to(tmp_path)
    for number in range(3):
        logging.getLogger("mobula.deploy.anything").info("event %d", number)
    lines = [line[20:] for line in screen.getvalue().splitlines()]
    assert [line for line in lines if line.startswith("event")] == ["event 0", "event 1", "event 2"]
    assert len([line for line in lines if "run.log cannot be written" in line and "No space left" in line]) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_a_thread_that_ends_with_an_error_is_one_line(
    tmp_path: Path, restored_logging: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    screen = io.StringIO()
    set_up_logging(Console(file=screen))
    log_thread_failures()
    thread = threading.Thread(target=lambda: 1 / 0, name="writer")
    thread.start()
    thread.join()
    shown = screen.getvalue()
    assert shown[20:] == "thread writer ended with an error (ZeroDivisionError: division by zero)\n"
