"""`mobula train algorithm=ppo_gae` with real engines, in short: the critic trains first, then the policy with it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from jobs import Job
from safetensors.numpy import load_file

from mobula.cluster.metrics.report.run_folder import RunFolder, read_run_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


PLACES = {
    "learner_ranks": (),
    "own_ranks": (
        "algorithm.critic.place=own_ranks",
        "resources.learner.num_workers=1",
        "resources.critic.num_workers=2",
    ),
}


@pytest.fixture(
    scope="module",
    params=["learner_ranks", pytest.param("own_ranks", marks=[pytest.mark.matrix, pytest.mark.exhaustive])],
)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """One vLLM engine and two FSDP2 ranks, or one of the policy and two of the critic; the first of three steps trains
    the critic alone."""
    folder = tmp_path_factory.mktemp("ppo_gae")
    words = ("experiment=digits", "algorithm=ppo_gae", "resources=laptop", "num_steps=3")
    words += (f"data.path={folder / 'digits'}", *PLACES[request.param])
    short = ("algorithm.critic.warmup_steps=1", "learner.warmup_steps=0")
    with Job(folder, (*words, *short, "resources.rollout.num_workers=1", "weight_sync.canary_interval=1")) as job:
        job.finish(job.start())
        yield job


@pytest.fixture(scope="module")
def report(job: Job) -> RunFolder:
    return read_run_folder(job.run_folder)


def test_the_critic_is_trained_in_every_step_and_the_policy_after_its_warm_up(report: RunFolder) -> None:
    assert (report.summary.status, report.summary.version) == ("done", 3)
    steps = [step.values for step in report.steps]
    assert [step["learning_rate"] > 0 for step in steps] == [False, True, True]
    for step in steps:
        assert step["value_loss"] > 0 and step["critic_grad_norm"] > 0 and step["critic_learning_rate"] > 0
        assert math.isfinite(step["explained_variance"]) and 0 <= step["value_clip_fraction"] <= 1
        assert step["skipped"] == step["critic_skipped"] == 0
    assert steps[1]["kl"] == pytest.approx(0, abs=1e-4), "the policy is still its reference"


def test_the_engine_follows_the_policy(report: RunFolder) -> None:
    assert report.summary.logprob_gap_max <= 1e-3 and 0 < report.summary.canary_max <= 1e-5
    assert report.summary.weight_syncs == 4


def test_the_critic_is_part_of_each_checkpoint_and_the_policy_leaves_without_it(job: Job) -> None:
    for version in ("000000", "000003"):
        assert (job.run_folder / "checkpoints" / f"step-{version}" / "learner" / "critic" / "state.json").is_file()
    start, trained = (load_file(job.run_folder / name / "model.safetensors") for name in ("reference", "policy"))
    assert start.keys() == trained.keys() == load_file(job.folder / "model" / "model.safetensors").keys()
    assert any((start[name] != trained[name]).any() for name in start)


def test_the_report_has_the_curves_of_the_critic(job: Job) -> None:
    page = (job.run_folder / "report.html").read_text()
    assert "Value loss" in page and "Explained variance" in page
