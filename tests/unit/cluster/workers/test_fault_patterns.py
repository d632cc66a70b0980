"""Faults of workers: causes, reports and patterns."""

from __future__ import annotations

import asyncio
import io
import logging
import math
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from fakes import LocalHandle, never
from rich.console import Console
from waiting import until

from mobula.cluster.errors import (
    EngineDiedError,
    EngineLostError,
    LogprobGapError,
    PlacementError,
    RewardError,
    RolloutError,
    StuckError,
    WorkerDiedError,
    loss_kind,
)
from mobula.cluster.failures import MAX_MESSAGE, MAX_TRACEBACK, Failure, cause_in_one_line, frames_in
from mobula.cluster.guard.guard import LogprobGuard
from mobula.cluster.metrics.report.run_folder import read_run_folder
from mobula.cluster.roles import ReplayStats, UpdateReport
from mobula.cluster.rollout.dispatcher import RepeatedEvents
from mobula.cluster.runtime.vitals import ObjectStoreUse
from mobula.cluster.weight_sync.tolerance import MeasuredRounding, Rounding
from mobula.cluster.workers.control import OUTCOMES_KEPT, ControlLoop, ControlPanel
from mobula.cluster.workers.faults import (
    FAULTS_FILE,
    MAX_PUSHES,
    AfterPushes,
    Death,
    Fault,
    FaultPatterns,
    OnePrompt,
    cause_of,
    read_faults,
    report_loss,
)
from mobula.cluster.workers.status import (
    MAX_WORKERS,
    InFlightSummary,
    Progress,
    RoleOutcome,
    RunStatus,
    ScaleRequest,
    WorkerState,
    WorkerStatus,
)
from mobula.configs.errors import ConfigError
from mobula.configs.load import load_config
from mobula.deploy.cli.errors import explained
from mobula.deploy.pages.report import render_report, write_report
from mobula.deploy.run.logs import LOG_FILE, OURS, log_to, set_up_logging, write_faults_to

CAUSE = "RuntimeError|model.py:7"

OTHER = "ValueError|model.py:9"

POISON = "0/7/s7"

MANY = frozenset([POISON, *(f"0/{n}/s{n}" for n in range(100, 163))])


def runs_until_found(patterns: FaultPatterns, in_flight: frozenset[str], *, killers: frozenset[str]) -> list[object]:
    """Engines that die of `killers`: what is found at each death while prompts run as the patterns allow."""
    found: list[object] = []
    finding = None
    while finding is None and len(found) < 20:
        limit = patterns.max_suspects_in_flight
        suspects = [prompt_id for prompt_id in in_flight if patterns.is_suspect(prompt_id)]
        suspects.sort(key=lambda prompt_id: prompt_id not in killers)  # never alone before the patterns single it out
        batch = frozenset(suspects[:limit]) if suspects else in_flight
        if batch & killers:
            finding = patterns.died(Death(CAUSE, 0, batch))
            found.append(finding)
        else:
            for prompt_id in batch:
                patterns.finished(prompt_id)
            in_flight -= batch
    return found


@pytest.mark.parametrize(("num_beside", "num_deaths"), [(0, 3), (1, 3), (3, 3), (7, 4), (63, 4)])
def test_a_prompt_that_ends_every_engine_is_found_within_four_deaths(num_beside: int, num_deaths: int) -> None:
    in_flight = frozenset([POISON, *(f"0/{n}/s{n}" for n in range(100, 100 + num_beside))])
    found = runs_until_found(FaultPatterns(), in_flight, killers=frozenset([POISON]))
    assert found == [None] * (num_deaths - 1) + [OnePrompt(POISON, num_deaths)]


def test_two_prompts_that_end_engines_are_found_one_after_the_other() -> None:
    patterns, killers = FaultPatterns(), frozenset([POISON, "0/150/s150"])
    *_, first = runs_until_found(patterns, MANY, killers=killers)
    *_, second = runs_until_found(patterns, MANY - {first.prompt_id}, killers=killers - {first.prompt_id})
    assert {first.prompt_id, second.prompt_id} == killers


def test_a_prompt_is_not_found_guilty_beside_another_one() -> None:
    patterns = FaultPatterns()
    for _ in range(5):
        assert patterns.died(Death(CAUSE, 0, frozenset([POISON, "0/8/s8"]))) is None
    assert patterns.run_alone


def test_suspects_that_all_finish_are_cleared() -> None:
    patterns = FaultPatterns()
    both = frozenset([POISON, "0/8/s8"])
    for _ in range(2):
        patterns.died(Death(CAUSE, 0, both))
    assert all(patterns.is_suspect(prompt_id) for prompt_id in both)
    for prompt_id in both:
        patterns.finished(prompt_id)
    assert patterns.max_suspects_in_flight is None
    assert patterns.died(Death(CAUSE, 0, both)) is None
    assert not patterns.is_suspect(POISON), "one death makes no suspects"


def dead(*pushes: int, cause: str | None = CAUSE, prompt: str | None = None) -> list[Death]:
    """Engines with so many pushes each, that died of one prompt, or each of its own."""
    return [Death(cause, num, frozenset([prompt or f"0/{n}/s"])) for n, num in enumerate(pushes)]


ALONE = dead(1, prompt=POISON)
FROM_OUTSIDE = dead(0, cause=None, prompt=POISON)


@pytest.mark.parametrize(
    ("deaths", "finding"),
    [
        pytest.param(dead(*[0] * 10), None, id="no prompt in common"),
        pytest.param(20 * FROM_OUTSIDE + 2 * ALONE + FROM_OUTSIDE + ALONE, OnePrompt(POISON, 3), id="from outside"),
        pytest.param(2 * ALONE + dead(1, cause=OTHER, prompt=POISON) + 2 * ALONE, None, id="another cause"),
        pytest.param(dead(1, 1, 1), AfterPushes(3), id="at the third push"),
        pytest.param(dead(MAX_PUSHES + 1, 1, 0, 1), AfterPushes(3), id="a death between pushes belongs to the series"),
        pytest.param(dead(1, 1, MAX_PUSHES + 1, 1, 0, MAX_PUSHES + 1, 0, 0, 0, 1), None, id="some pushes or none"),
        pytest.param(3 * ALONE, OnePrompt(POISON, 3), id="a prompt before a push"),
    ],
)
def test_a_series_of_deaths_has_its_finding_at_the_last_one(deaths: list[Death], finding: object) -> None:
    patterns = FaultPatterns()
    assert [patterns.died(death) for death in deaths] == [None] * (len(deaths) - 1) + [finding]


def test_prompts_in_common_that_are_cleared_leave_the_push() -> None:
    patterns, both = FaultPatterns(), frozenset([POISON, "0/8/s8"])
    for _ in range(3):
        assert patterns.died(Death(CAUSE, 1, both)) is None, "one of them may be the cause"
    for prompt_id in both:
        patterns.finished(prompt_id)
    assert patterns.died(Death(CAUSE, 1, frozenset(["0/9/s9"]))) == AfterPushes(4)


IN_FLIGHT = InFlightSummary(num_prompts=5, oldest_id="0/7/s7", oldest_age_s=2.5)

REPLAY = ReplayStats(num_ready=3, num_taken=2, num_bytes=4096, oldest_age_s=0.5, oldest_id="0/1/s1")


class FakeRole:
    """Accepts any number, or raises."""

    def __init__(self, name: str, num_workers: int, error: Exception | None = None) -> None:
        self.name = name
        self.num_workers = num_workers
        self.error = error

    def status(self) -> list[WorkerStatus]:
        return [WorkerStatus(f"{self.name}/{i}", WorkerState.SERVING, 7, 1, 0) for i in range(self.num_workers)]

    async def scale(self, num_workers: int) -> None:
        if self.error is not None:
            raise self.error
        self.num_workers = num_workers


class PanelHost:
    """Makes panels, and remembers what became of them."""

    def __init__(self, make: Callable[[], Any] = ControlPanel) -> None:
        self.panels: list[Any] = []
        self.ended: list[Any] = []
        self.losses: list[str] = []
        self.statuses: list[RunStatus] = []
        self.scaled: list[tuple[str, int]] = []
        self._make = make

    def spawn(self) -> LocalHandle:
        self.panels.append(self._make())
        return LocalHandle(self.panels[-1])

    async def end(self, panel: LocalHandle) -> None:
        self.ended.append(panel)


async def stats() -> ReplayStats:
    return REPLAY


def control(host: PanelHost, *roles: FakeRole, **changes: Any) -> ControlLoop:
    settings = {
        "spawn_panel": host.spawn, "end_panel": host.end,
        "progress": lambda: Progress(step=4, phase="update", seconds=1.5), "in_flight": lambda: IN_FLIGHT,
        "replay": stats, "roles": {role.name: role for role in roles},
        "ranks": lambda: [WorkerStatus("learner/0", WorkerState.SERVING, 7, 0, 0)],
        "object_store": lambda: ObjectStoreUse(10, 40), "earlier_scale": {}, "has_begun": lambda: True,
        "on_scaled": lambda role, num_workers: host.scaled.append((role, num_workers)),
        "on_panel_lost": host.losses.append, "on_status": host.statuses.append, "interval_s": 0.001, "start_s": 0.2,
        "deadline_s": 0.2, "scale_s": 0.2,
    }  # fmt: skip
    return ControlLoop("digits", 100, **{**settings, **changes})


async def outcome(host: PanelHost, loop: ControlLoop, **wanted: int) -> tuple[RoleOutcome, ...]:
    """What becomes of one request."""
    async with loop.running():
        panel = await until(lambda: host.panels and host.panels[-1])
        return await until(lambda: panel.ask(ScaleRequest("a", wanted)))


async def test_the_newest_status_names_phase_queue_and_workers() -> None:
    host = PanelHost()
    async with control(host, FakeRole("reward", 2), FakeRole("reference", 1)).running():
        status = await until(lambda: host.panels and host.panels[0].status())
    assert (status.run, status.total_steps, status.progress) == ("digits", 100, Progress(4, "update", 1.5))
    assert status.replay == REPLAY
    assert [worker.name for worker in status.workers] == ["reward/0", "reward/1", "reference/0", "learner/0"]
    assert status.object_store == ObjectStoreUse(10, 40)
    assert status.num_panels_lost == 0 and status.driver_pid > 0


async def test_a_loop_that_stood_still_reports_for_how_long() -> None:
    host = PanelHost()
    async with control(host, FakeRole("reward", 1)).running():
        await until(lambda: host.statuses)
        time.sleep(0.4)  # the loop serves nothing meanwhile
        num_before = len(host.statuses)
        await until(lambda: len(host.statuses) > num_before + 2)
    assert max(status.loop_lag_s for status in host.statuses[num_before:]) >= 0.25


async def test_a_request_is_applied_role_by_role_and_seen_in_the_status() -> None:
    host, reward, reference = PanelHost(), FakeRole("reward", 1), FakeRole("reference", 1)
    loop = control(host, reward, reference)
    outcomes = await outcome(host, loop, reward=8, reference=2)
    assert outcomes == (RoleOutcome("reward", 8, ""), RoleOutcome("reference", 2, ""))
    assert (reward.num_workers, reference.num_workers) == (8, 2)
    assert host.scaled == [("reward", 8), ("reference", 2)]


async def test_a_run_that_goes_on_is_scaled_as_before_once_it_has_begun_and_a_refusal_is_no_end() -> None:
    host, reward, reference = PanelHost(), FakeRole("reward", 1), FakeRole("reference", 1, PlacementError("no room"))
    has_begun = False
    earlier = {"reference": 4, "reward": 3}
    loop = control(host, reward, reference, earlier_scale=earlier, has_begun=lambda: has_begun)
    async with loop.running():
        await until(lambda: len(host.statuses) > 2)
        assert reward.num_workers == 1
        has_begun = True
        await until(lambda: reward.num_workers == 3)
    assert reference.num_workers == 1 and host.scaled == [("reward", 3)]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("reward=0: at least one"), "reward=0: at least one"),
        (PlacementError("2 more reward workers do not fit"), "2 more reward workers do not fit"),
        (KeyError("bug"), "KeyError: 'bug'; run.log has the traceback"),
    ],
)
async def test_what_a_role_refuses_is_reported_and_the_run_goes_on(error: Exception, message: str) -> None:
    host = PanelHost()
    (refused,) = await outcome(host, control(host, FakeRole("reward", 1, error)), reward=3)
    assert not refused.is_accepted and refused.refusal == message


async def test_a_role_that_the_run_does_not_have_is_refused_with_those_that_it_has() -> None:
    host = PanelHost()
    (refused,) = await outcome(host, control(host, FakeRole("reward", 1)), learner=3)
    assert "no scalable role learner" in refused.refusal and "it has reward" in refused.refusal


async def test_more_workers_than_a_role_may_have_are_refused_before_the_role_is_asked() -> None:
    host, reward, reference = PanelHost(), FakeRole("reward", 1), FakeRole("reference", 1)
    loop = control(host, reward, reference)
    refused, accepted = await outcome(host, loop, reward=MAX_WORKERS + 1, reference=MAX_WORKERS)
    assert refused.refusal == "a role has at most 10000 workers: ask for fewer" and reward.num_workers == 1
    assert accepted.is_accepted and reference.num_workers == MAX_WORKERS


async def test_a_role_that_does_not_answer_is_refused_in_time() -> None:
    class Stuck(FakeRole):
        async def scale(self, num_workers: int) -> None:
            await never()

    host = PanelHost()
    (refused,) = await outcome(host, control(host, Stuck("reward", 1), scale_s=0.02), reward=3)
    assert "did not answer within 0.02 s" in refused.refusal


async def test_a_panel_that_dies_is_counted_and_followed_by_another() -> None:
    class Dying(ControlPanel):
        def exchange(self, *args: Any) -> list[ScaleRequest]:
            raise WorkerDiedError("its process ended")

    panels = iter([Dying, Dying, ControlPanel])
    host = PanelHost(lambda: next(panels)())
    async with control(host, FakeRole("reward", 1)).running():
        status = await until(lambda: len(host.panels) == 3 and host.panels[2].status())
    assert status.num_panels_lost == 2
    assert host.losses == ["WorkerDiedError", "WorkerDiedError"]
    assert len(host.ended) == 3, "dead ones and the last one are ended"


async def test_a_panel_that_hangs_is_replaced_and_nothing_that_was_done_is_forgotten() -> None:
    class Full(ControlPanel):
        """Has a request, and hangs from the second visit on."""

        num_visits = 0

        def exchange(self, status: Any, outcomes: Any) -> Any:
            self.num_visits += 1
            return [ScaleRequest("a", {"reward": 2})] if self.num_visits == 1 else never()

    panels = iter([Full, ControlPanel])
    host, reward = PanelHost(lambda: next(panels)()), FakeRole("reward", 1)
    async with control(host, reward, deadline_s=0.02).running():
        await until(lambda: len(host.panels) == 2 and reward.num_workers == 2)
        assert await until(lambda: host.panels[1].ask(ScaleRequest("a", {"reward": 2})))
    assert host.losses == ["DeadlineError"] and reward.num_workers == 2


async def test_a_panel_that_cannot_be_made_does_not_end_the_run() -> None:
    attempts = iter([ValueError("The name control is already taken"), None])

    def make() -> ControlPanel:
        error = next(attempts)
        if error is not None:
            raise error
        return ControlPanel()

    host = PanelHost(make)
    async with control(host).running():
        await until(lambda: host.panels and host.panels[0].status())
    assert host.losses == ["ValueError"]


async def test_the_start_of_a_panels_process_may_take_longer_than_a_call() -> None:
    class SlowStart(ControlPanel):
        async def exchange(self, status: Any, outcomes: Any) -> Any:
            if self.status() is None:
                await asyncio.sleep(0.1)
            return super().exchange(status, outcomes)

    host = PanelHost(SlowStart)
    async with control(host, start_s=30.0, deadline_s=0.05).running():
        status = await until(lambda: host.panels and host.panels[0].status())
    assert status.num_panels_lost == 0 and host.losses == []


async def test_the_panel_is_ended_with_the_run_even_if_that_fails() -> None:
    host = PanelHost()

    async def fail(panel: Any) -> None:
        raise RuntimeError("cannot be killed")

    with pytest.raises(KeyError):
        async with control(host, end_panel=fail).running():
            await until(lambda: host.panels and host.panels[0].status())
            raise KeyError("the run's own error")


def test_the_panel_keeps_the_newest_outcomes() -> None:
    panel = ControlPanel()
    for index in range(OUTCOMES_KEPT + 5):
        panel.exchange(None, {str(index): (RoleOutcome("reward", index, ""),)})
    assert panel.ask(ScaleRequest("5", {})) == (RoleOutcome("reward", 5, ""),)
    assert panel.ask(ScaleRequest("4", {})) is None


def test_a_request_is_taken_once_however_often_it_is_asked_for() -> None:
    panel, request = ControlPanel(), ScaleRequest("a", {"reward": 2})
    assert panel.ask(request) is panel.ask(request) is None
    assert panel.exchange(None, {}) == [request]
    assert panel.ask(request) is None
    assert panel.exchange(None, {"a": (RoleOutcome("reward", 2, ""),)}) == []
    assert panel.ask(request) == (RoleOutcome("reward", 2, ""),)


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


def test_a_death_is_one_line_of_the_console_and_a_traceback_in_the_log(screen: io.StringIO, tmp_path: Path) -> None:
    report_loss("rollout/0", death(), "prompts in flight that are retried: 64")
    [line] = screen.getvalue().splitlines()
    assert "rollout/0 is lost (died): RuntimeError: CPU Generator does not support set_offset [/seed] at " in line
    assert "cluster/workers/test_fault_patterns.py:" in line
    assert "in death; prompts in flight that are retried: 64" in line
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


def test_the_final_line_names_the_error_and_its_log(
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


def raised(message: str) -> Exception:
    def inner() -> None:
        raise RuntimeError(message)

    def outer() -> None:
        inner()

    try:
        outer()
    except RuntimeError as error:
        return error
    raise AssertionError


def test_the_cause_of_an_error_of_a_worker_names_the_frames_in_the_worker() -> None:
    error = raised("no offset")
    assert cause_in_one_line(error).startswith("RuntimeError: no offset at cluster/workers/test_fault_patterns.py:")
    error.add_note('Traceback:\n  File "/x/mobula/learner/batch.py", line 7, in fetch_items\n    raise error')
    assert cause_in_one_line(error) == "RuntimeError: no offset at mobula/learner/batch.py:7 in fetch_items"


def test_it_names_the_exception_and_the_innermost_frames_first() -> None:
    failure = Failure.of(raised("no\n  offset"))
    assert failure.summary == "RuntimeError: no offset"
    assert [frame.rpartition(" in ")[2] for frame in failure.frames] == ["inner", "outer", "raised"]
    assert failure.frames[0].startswith("cluster/workers/test_fault_patterns.py:")
    assert str(failure).startswith("RuntimeError: no offset at cluster/workers/test_fault_patterns.py:")
    assert "\n" not in str(failure) and "RuntimeError: no" in failure.traceback


def test_equal_causes_have_equal_fingerprints_whatever_their_message() -> None:
    first, second = Failure.of(raised("request 1")), Failure.of(raised("request 2"))
    assert first.fingerprint == second.fingerprint
    assert first.fingerprint != Failure.of(ValueError("request 1")).fingerprint


def test_a_long_message_and_a_long_traceback_are_cut() -> None:
    failure = Failure.of(raised("x" * 100_000))
    assert len(failure.summary) <= MAX_MESSAGE + len("RuntimeError: ")
    assert len(failure.traceback) == MAX_TRACEBACK


@pytest.mark.parametrize(
    ("exit_code", "message", "is_a_pattern"),
    [
        (-9, "was ended by signal 9 (SIGKILL)", False),
        (-15, "was ended by signal 15 (SIGTERM)", False),
        (-11, "crashed with signal 11 (SIGSEGV)", True),
        (1, "ended with exit code 1 and left no exception", False),
        (None, "does not answer, and its exit code is not known", False),
    ],
)
def test_a_process_is_named_by_how_it_ended(exit_code: int | None, message: str, is_a_pattern: bool) -> None:
    failure = Failure.of_exit(exit_code, "the engine's process 7")
    assert str(failure) == f"the engine's process 7 {message}"
    assert (failure.fingerprint is not None) == is_a_pattern


@pytest.mark.parametrize("kind", [RolloutError, StuckError])
def test_an_engines_death_outlives_pickle_with_its_cause_and_its_notes(kind: type[Exception]) -> None:
    failure = Failure.of(raised("no offset"))
    error = EngineDiedError("it failed prompt 7", failure) if kind is RolloutError else EngineLostError(failure)
    error.add_note("seen by rollout/0")
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, kind) and copy.failure == error.failure and str(copy) == str(error)
    assert (copy.__notes__, loss_kind(copy)) == (["seen by rollout/0"], "died")


def test_frames_are_read_from_a_printed_traceback() -> None:
    text = Failure.of(raised("no offset")).traceback
    assert frames_in(text) == Failure.of(raised("no offset")).frames
    assert frames_in("no traceback") == ()


def check(gap: float | None, *, stops: bool = True, rounding: Rounding | None = None) -> None:
    metrics = {} if gap is None else {"logprob_gap_mean": gap, "logprob_gap_max": 4 * gap}
    guard = LogprobGuard(dtype="float32", limit=1e-3, rounding=rounding or Rounding(), stops=stops)
    guard.check(UpdateReport(3, metrics))


@pytest.mark.parametrize("gap", [None, 5e-7, 1e-3])
def test_a_step_within_the_limit_or_without_a_gap_passes(gap: float | None, caplog) -> None:
    check(gap)
    assert not caplog.records


@pytest.mark.parametrize("gap", [0.01, math.nan])
def test_a_step_over_the_limit_stops_with_the_causes(gap: float) -> None:
    match = (
        rf"step 3: .* by {gap:.3g} nat in the mean, .*supervision\.max_logprob_gap\.float32=0\.001.*template.*"
        r"penalties of generation_config\.json.*policy\.dropout.*canary_interval=1.*on_logprob_gap=warn"
    )
    with pytest.raises(LogprobGapError, match=match):
        check(gap)


def test_the_limit_grows_with_the_rounding_of_the_model_and_the_message_has_both() -> None:
    rounding = MeasuredRounding()
    rounding.nat = 0.0006
    check(0.0059, rounding=rounding)
    with pytest.raises(LogprobGapError, match=r"max_logprob_gap\.float32=0\.001, widened to 0\.006 by the rounding"):
        check(0.0061, rounding=rounding)


def test_a_step_over_the_limit_warns_where_a_run_asks_for_that(caplog) -> None:
    with caplog.at_level(logging.WARNING):
        check(0.26, stops=False)
    assert "by 0.26 nat in the mean, 1.04 at most" in caplog.text


def test_the_limit_is_that_of_the_precision_and_one_number_is_the_limit_of_both() -> None:
    own = load_config(["experiment=digits"]).supervision.max_logprob_gap
    assert (own.of("float32"), own.of("bfloat16")) == (1e-3, 0.3)
    both = load_config(["experiment=digits", "supervision.max_logprob_gap=0.02"]).supervision.max_logprob_gap
    assert (both.of("float32"), both.of("bfloat16")) == (0.02, 0.02)


def test_dropout_in_rl_needs_a_guard_that_warns() -> None:
    with pytest.raises(ConfigError, match=r"policy\.dropout=true .*supervision\.on_logprob_gap=stop"):
        load_config(["experiment=digits", "policy.dropout=true"])
    load_config(["experiment=digits", "policy.dropout=true", "supervision.on_logprob_gap=warn"])
