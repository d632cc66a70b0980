"""`mobula train` with a curriculum by success and return-to-go credit, in short: stages open, and survive a resume."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import pytest
from jobs import SMALL, Job

from mobula.cluster.metrics.report.run_folder import RunFolder, read_run_folder
from mobula.deploy.pages.report import write_report

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.timeout(1500)]

STAGES = "[{size: 2, hole_share: 0.0}, {size: 3, hole_share: 0.15}, {size: 4, hole_share: 0.2}]"
WORDS = (
    "experiment=pixel_maze", "resources=laptop", "sampler=huggingface", "resources.rollout.num_workers=1",
    "learner=single", "resources.learner.num_workers=1", "algorithm.advantage=return_to_go",
    "algorithm.drop_uniform_groups=false", "environment.host=inline", "environment.num_train=96",
    "environment.num_validation=4", "environment.num_test=8", "environment.curriculum.kind=success",
    f"environment.curriculum.stages={STAGES}", "environment.curriculum.episodes=24",
    "environment.curriculum.success=0.05", "warm_start.num_steps=40", "warm_start.num_rows=48",
    "checkpoints.interval_steps=1", "checkpoints.keep=6",
)  # fmt: skip


def state_at(job: Job, version: int) -> dict[str, object]:
    """What a checkpoint keeps of the curriculum."""
    file = job.run_folder / "checkpoints" / f"step-{version:06d}" / "state.json"
    return json.loads(file.read_text())["parts"]["curriculum"]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    folder = tmp_path_factory.mktemp("curriculum")
    job = Job(folder, WORDS, small=SMALL[1:])  # the rewards are those of the environment
    with job:
        job.overrides = (*WORDS, "num_steps=3")
        job.finish(job.start())
        job.overrides = (*WORDS, "num_steps=5", "resume=auto")
        job.finish(job.start())
        yield job


@pytest.fixture(scope="module")
def report(job: Job) -> RunFolder:
    return read_run_folder(job.run_folder)


def test_stages_open_in_order_by_success_and_go_on_after_a_resume(job: Job, report: RunFolder) -> None:
    assert (report.summary.status, report.summary.version) == ("done", 5)
    assert [step.step for step in report.steps] == [1, 2, 3, 4, 5]
    stages = [int(step.values["curriculum_stage"]) for step in report.steps]
    assert stages == sorted(stages) and stages[-1] >= 1, "a stage has opened"
    assert stages[3] >= stages[2], "the resumed part does not begin with the first stage"
    assert state_at(job, 3)["newest"] == stages[2]


def test_the_report_says_how_far_the_curriculum_has_come(job: Job, report: RunFolder) -> None:
    stage = int(report.steps[-1].values["curriculum_stage"])
    page = write_report(job.run_folder).read_text()
    assert "curriculum stage" in page and f">{stage}<" in page


def test_each_turn_is_trained_with_what_followed_it(report: RunFolder) -> None:
    for step in report.steps:
        assert step.values["turns_mean"] > 1
        assert step.values["grad_norm"] > 0 and math.isfinite(step.values["loss"])
        assert "turn_reward_1" in step.values
    assert report.summary.logprob_gap_max <= 1e-3
