"""One event is one line on the console, with its cause; the log file has the traceback, and the report a row."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from rich.console import Console

from mobula.cluster.errors import EngineDiedError, RewardError, WorkerDiedError
from mobula.cluster.failures import Failure
from mobula.cluster.metrics.report.run_folder import read_run_folder
from mobula.cluster.rollout.dispatcher import RepeatedEvents
from mobula.cluster.workers.faults import FAULTS_FILE, Fault, cause_of, read_faults, report_loss
from mobula.cluster.workers.status import Progress
from mobula.deploy.cli.errors import explained
from mobula.deploy.report.report import render_report, write_report
from mobula.deploy.run.logs import LOG_FILE, OURS, log_to, set_up_logging, write_faults_to


class FakeLoop:
    """A loop at a step and phase of the test's choice."""

    def __init__(self) -> None:
        self.now = Progress(0, "starting", 1.5)

    def progress(self) -> Progress:
        return self.now


@pytest.fixture
def loop() -> FakeLoop:
    return FakeLoop()


@pytest.fixture
def screen(tmp_path: Path, loop: FakeLoop) -> Iterator[io.StringIO]:
    """What a narrow console shows of a run that logs into `tmp_path`."""
    shown = io.StringIO()
    loggers = [logging.getLogger(name) for name in (*OURS, "mobula.cluster.workers.faults")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    set_up_logging(Console(file=shown, width=40))
    log_to(tmp_path)
    write_faults_to(tmp_path, loop.progress)
    yield shown
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        for handler in logger.handlers:
            handler.close()
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def death() -> EngineDiedError:
    try:
        raise RuntimeError("CPU Generator does not support set_offset [/seed]")
    except RuntimeError as error:
        return EngineDiedError("the engine failed prompt 0/0/s0", Failure.of(error))


def test_a_death_is_one_line_of_the_console_and_its_traceback_is_in_the_log_file(
    screen: io.StringIO, tmp_path: Path
) -> None:
    report_loss("rollout/0", death(), "prompts in flight that are retried: 64")
    [line] = screen.getvalue().splitlines()
    assert "rollout/0 is lost (died): RuntimeError: CPU Generator does not support set_offset [/seed] at " in line
    assert "unit/cluster/test_fault_reports.py:" in line and "in death; prompts in flight that are retried: 64" in line
    log = (tmp_path / LOG_FILE).read_text()
    assert log.count("Traceback (most recent call last)") == 1
    assert log.count("rollout/0 is lost") == 1


def test_faults_in_a_row_with_one_cause_are_one_row_of_the_report(screen: io.StringIO, tmp_path: Path) -> None:
    for _ in range(3):
        report_loss("rollout/0", death())
    report_loss("reward/1", WorkerDiedError("its process <7> was killed"))
    faults = read_faults(tmp_path / FAULTS_FILE)
    assert [fault.worker for fault in faults] == ["rollout/0"] * 3 + ["reward/1"]
    html = render_report(read_run_folder(tmp_path))
    assert html.count('<th scope="row">rollout/0</th>') == 1 and "<td>3</td>" in html
    assert "died: its process &lt;7&gt; was killed" in html
    assert "4 in all" in html
    write_report(tmp_path)


def test_a_fault_has_the_step_and_the_phase_of_its_moment(screen: io.StringIO, loop: FakeLoop, tmp_path: Path) -> None:
    report_loss("rollout/0", death())
    loop.now = Progress(1, "wait_for_rollouts", 0.5)
    report_loss("rollout/0", death())
    loop.now = Progress(3, "update", 0.5)
    report_loss("rollout/0", death())
    report_loss("reward/1", WorkerDiedError("its process was killed"))
    faults = read_faults(tmp_path / FAULTS_FILE)
    moments = [(0, "starting"), (1, "wait_for_rollouts"), (3, "update"), (3, "update")]
    assert [(fault.step, fault.phase) for fault in faults] == moments
    html = render_report(read_run_folder(tmp_path))
    assert '<td>0 to 3</td><td>starting, waiting for rollouts, update</td><th scope="row">rollout/0</th>' in html
    assert '<td>3</td><td>update</td><th scope="row">reward/1</th>' in html


def test_rows_of_older_files_have_no_step_and_no_phase(tmp_path: Path) -> None:
    (tmp_path / FAULTS_FILE).write_text('{"at_s": 1.0, "worker": "reward/0", "kind": "died", "cause": "killed"}\n')
    assert read_faults(tmp_path / FAULTS_FILE) == [Fault(1.0, "reward/0", "died", "killed", step=None, phase="")]
    assert '<td>–</td><td>–</td><th scope="row">reward/0</th>' in render_report(read_run_folder(tmp_path))


def test_a_report_without_faults_states_that(tmp_path: Path) -> None:
    assert "No worker was lost." in render_report(read_run_folder(tmp_path))


def test_a_last_line_that_is_half_written_is_left_out_and_a_broken_one_before_it_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / FAULTS_FILE
    whole = '{"at_s": 1.0, "worker": "reward/0", "kind": "died", "cause": "killed"}\n'
    file.write_text(whole + '{"at_s": 1.')
    assert read_faults(file) == [Fault(1.0, "reward/0", "died", "killed")]
    file.write_text("{\n" + whole)
    with pytest.raises(ValueError, match="line 1 is no fault"):
        read_faults(file)


def test_an_exception_of_a_worker_is_named_with_the_frames_of_its_remote_traceback() -> None:
    error = KeyError("pixel_values")
    error.add_note('ray::Scorer.score()\n  File "/x/site-packages/torch/nn/module.py", line 9, in forward\nKeyError')
    assert cause_of(error) == "KeyError: 'pixel_values' at torch/nn/module.py:9 in forward"


def test_the_final_line_names_the_error_and_the_file_to_read(
    screen: io.StringIO, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit), explained():
        raise RewardError("every reward worker was lost")
    final = capsys.readouterr().err
    assert len(final.splitlines()) == 1
    assert "every reward worker was lost; traceback and earlier faults: " in final
    assert final.strip().endswith(str(tmp_path / LOG_FILE))
    assert "Traceback (most recent call last)" in (tmp_path / LOG_FILE).read_text()
    assert screen.getvalue() == "", "the console shows the final line once"


def test_a_bug_is_in_the_log_file_and_travels_on(screen: io.StringIO, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), explained():
        raise ZeroDivisionError("a bug")
    assert "ZeroDivisionError: a bug" in (tmp_path / LOG_FILE).read_text()


async def test_equal_events_of_one_moment_are_one_line_with_a_count(caplog: pytest.LogCaptureFixture) -> None:
    events = RepeatedEvents(logging.getLogger("tests"), window_s=0.01)
    for number in range(64):
        events.note("failed and are retried: no output", f"prompt {number}", "prompts")
    events.note("failed and are retried: no room", "prompt 64", "prompts")
    await asyncio.sleep(0.05)
    assert caplog.messages == [
        "64 prompts failed and are retried: no output (first: prompt 0)",
        "1 prompts failed and are retried: no room (first: prompt 64)",
    ]
