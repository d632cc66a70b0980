"""`mobula train` on a reward with a loophole: the guard rolls the live run back, also after a kill, then stops it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from jobs import REPOSITORY, RUN_DEADLINE_S, Job

from mobula.cluster.metrics.guard_events import GUARD_FILE, GuardEvent, read_events
from mobula.cluster.metrics.report.run_folder import RunFolder, read_run_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TASK = REPOSITORY / "tests" / "support" / "hackable"

WORDS = (
    "experiment=digits", "resources=laptop", "rewards=largest_digit", "guard.window_steps=3", "guard.action=rollback",
    "guard.max_actions=1", "learner.warmup_steps=0", "evaluation.num_prompts=16", "checkpoints.keep=1",
    "metrics.progress=false", "timeouts.start_s=900",
)  # fmt: skip
RESUMED = (*WORDS, "num_steps=30", "checkpoints.interval_steps=5", "resume=auto")
ZERO = ("learner=deepspeed", "learner.zero_stage=3", *WORDS, "num_steps=18", "checkpoints.interval_steps=3")
WITHIN = 9  # steps, within which the guard fires first

STOPPED = 3  # exit code


class Guarded(NamedTuple):
    """A job, and its last step before it was killed."""

    job: Job
    last: int


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A job that is killed a step after its rollback, goes on, and is stopped at the next alarm."""
    folder = tmp_path_factory.mktemp("guard")
    with pytest.MonkeyPatch.context() as environment, Job(folder, RESUMED, small=()) as job:
        environment.setenv("MOBULA_TASKS", str(TASK))
        killed = job.start()
        job.wait(killed, lambda: went_on(job))
        killed.kill()
        killed.wait()
        last = job.steps[-1]
        assert job.start().wait(RUN_DEADLINE_S) == STOPPED, job.output
        yield Guarded(job, last)


@pytest.fixture(scope="module")
def job(guarded: Guarded) -> Job:
    return guarded.job


def events(job: Job) -> list[GuardEvent]:
    return list(read_events(job.run_folder / GUARD_FILE))


def went_on(job: Job) -> bool:
    """Whether a step is trained after the rollback."""
    return any(step > event.version for event in events(job) for step in job.steps[-1:])


@pytest.fixture(scope="module")
def report(job: Job) -> RunFolder:
    return read_run_folder(job.run_folder)


def test_the_guard_fires_within_three_windows_and_the_restored_weights_are_sampled(job: Job, report: RunFolder) -> None:
    assert_restored(events(job)[0], report)


def assert_restored(rollback: GuardEvent, report: RunFolder) -> None:
    assert rollback.restored <= rollback.agreeing < rollback.version <= WITHIN
    judge = {step.step: step.values["guard_judge"] for step in report.steps}
    assert judge[rollback.version + 1] > judge[rollback.version] + 0.1
    assert max(step.values["logprob_gap_mean"] for step in report.steps) < 0.01, "engines have the learner's weights"


def test_a_resumed_run_repeats_the_rollback_and_counts_it(guarded: Guarded, report: RunFolder) -> None:
    job = guarded.job
    assert [event.action for event in events(job)] == ["rollback", "stop"]
    kl = {step.step: step.values["kl"] for step in report.steps}
    assert kl[guarded.last + 1] < 0.7 * kl[events(job)[0].version], "without the rollback it would have grown"


def test_every_step_takes_new_prompts_also_after_the_rollback(job: Job) -> None:
    states = [json.loads(path.read_text()) for path in (job.run_folder / "checkpoints").glob("step-*/state.json")]
    newest = max(states, key=lambda state: state["version"])
    assert newest["version"] > events(job)[0].version
    assert newest["parts"]["stream"]["cursor"] >= 32 * newest["version"]


def test_the_report_marks_the_actions_in_one_chart_of_reward_and_judge(job: Job) -> None:
    page = (job.run_folder / "report.html").read_text()
    assert page.count("Reward and judge: trained reward from") == 1
    assert f"rollback (judge) at step {events(job)[0].version}" in page


DEADLINE_S = 1800.0


@pytest.mark.timeout(2400)
def test_zero_ranks_restore_a_checkpoint_before_the_divergence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOBULA_TASKS", str(TASK))
    with Job(tmp_path, ZERO, small=()) as job:
        code = job.start().wait(DEADLINE_S)
        assert code in (0, STOPPED) and events(job), job.output
    rollback, found = events(job)[0], read_run_folder(job.run_folder)
    assert (rollback.action, found.summary.learner_backend) == ("rollback", "deepspeed")
    assert_restored(rollback, found)
