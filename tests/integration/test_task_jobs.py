"""`mobula train` on tasks and algorithms: long answers, curriculum, programs, critic, teacher, calculator."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import pytest
from episode_data import write_program
from jobs import BARE, SMALL, Job, none_left
from safetensors.numpy import load_file
from verifiers_tasksets import NEEDS_VERIFIERS, PYTHON, write_tasksets

from mobula.cluster.metrics.report.run_folder import RunFolder
from mobula.deploy.pages.report import write_report
from mobula.examples.digits.digits import write_digits
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

NUM_STEPS = 3

MAX_IMAGES = 2

DIGIT_LIST_SMALL = (  # enough to write the sentences; the digits in them are still right by chance
    *BARE, "warm_start.num_steps=50", "warm_start.batch_size=16", "warm_start.check_interval=50",
    "warm_start.max_checks_rows=8", "evaluation.num_prompts=32", "algorithm.prompts_per_step=4",
    "algorithm.samples_per_prompt=8", "algorithm.max_concurrent_groups=8",
)  # fmt: skip


def short_lists(folder: Path) -> Path:
    """Only the questions on one or two images."""
    write_digits(folder, task="digit_list")
    for split in ("train", "validation", "test"):
        lines = (folder / f"{split}.jsonl").read_text().splitlines(keepends=True)
        short = [line for line in lines if len(json.loads(line)["image"]) <= MAX_IMAGES]
        (folder / f"{split}.jsonl").write_text("".join(short))
    return folder


@pytest.mark.load
@pytest.mark.exhaustive
def test_long_answers_are_taught_and_engine_and_learner_agree_on_every_token(tmp_path: Path) -> None:
    words = ("experiment=digit_list", "resources=laptop", f"data.path={short_lists(tmp_path / 'data')}")
    with Job(tmp_path, (*words, "data.kind=jsonl", f"num_steps={NUM_STEPS}"), small=DIGIT_LIST_SMALL) as job:
        found = job.trained(NUM_STEPS)
        none_left(job.marks[0])
    assert found.faults == []
    assert 0.03 < found.summary.accuracy_before < 1, "0 without the right sentences; random digits in them: a tenth"
    assert any(0 < sample.reward < 1 for sample in found.samples.samples)
    ended = {sample.num_tokens for sample in found.samples.samples if sample.finish_reason == "stop"}
    assert ended & {24, 25}, "on one image"
    assert ended & {40, 41}, "on two"
    assert found.summary.logprob_gap_mean <= 1e-5
    assert 0 < found.summary.logprob_gap_max <= 1e-3


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
    return job.done(5)


@pytest.mark.matrix
def test_stages_open_in_order_by_success_and_go_on_after_a_resume(job: Job, report: RunFolder) -> None:
    assert [step.step for step in report.steps] == [1, 2, 3, 4, 5]
    stages = [int(step.values["curriculum_stage"]) for step in report.steps]
    assert stages == sorted(stages) and stages[-1] >= 1, "a stage has opened"
    assert stages[3] >= stages[2], "the resumed part does not begin with the first stage"
    assert state_at(job, 3)["newest"] == stages[2]


@pytest.mark.matrix
def test_the_report_says_how_far_the_curriculum_has_come(job: Job, report: RunFolder) -> None:
    stage = int(report.steps[-1].values["curriculum_stage"])
    page = write_report(job.run_folder).read_text()
    assert "curriculum stage" in page and f">{stage}<" in page


@pytest.mark.matrix
def test_each_turn_is_trained_with_what_followed_it(report: RunFolder) -> None:
    for step in report.steps:
        assert step.values["turns_mean"] > 1
        assert step.values["grad_norm"] > 0 and math.isfinite(step.values["loss"])
        assert "turn_reward_1" in step.values
    assert report.summary.logprob_gap_max <= 1e-3


NUM_AGENT_STEPS = 20

AGENT = (
    "policy=tiny_qwen2_5_vl", "data=environment", "rewards=environment", "resources=laptop",
    "resources.rollout.num_workers=1", f"num_steps={NUM_AGENT_STEPS}",
    "evaluation.split=test", "evaluation.num_prompts=8",
    "environment.num_train=2", "environment.options.num_validation=1", "environment.options.num_test=1",
    "environment.max_tokens=200", "data.max_pixels=50176", "data.max_prompt_tokens=400", "sampler.max_tokens=6",
    "algorithm.samples_per_prompt=8", "algorithm.prompts_per_step=8", "algorithm.drop_uniform_groups=false",
    "learner.learning_rate=1e-3",
)  # fmt: skip


def check_agent(folder: Path, *words: str) -> None:
    with Job(folder, (*AGENT, *words), BARE) as job:
        report = job.trained(NUM_AGENT_STEPS)
    assert report.summary.logprob_gap_max <= 1e-3
    assert all(record.values["turns_mean"] == 2 for record in report.steps)
    rewards = [record.values["reward_mean"] for record in report.steps]
    assert mean(rewards[-5:]) > mean(rewards[:2]) + 0.2, rewards


@pytest.mark.matrix
def test_a_program_of_ones_own_is_trained(tmp_path: Path) -> None:
    options = write_program(tmp_path)
    command = f"environment.options.command=[{sys.executable},{tmp_path / 'agent.py'}]"
    check_agent(tmp_path, "environment=program", command, f"environment.options.tasks={options['tasks']}")


@pytest.mark.matrix
@NEEDS_VERIFIERS
def test_an_agent_of_verifiers_is_trained(tmp_path: Path) -> None:
    folder = write_tasksets(tmp_path)
    words = ("environment.options.env.taskset.id=mobula-letters", f"environment.options.import_path=[{folder}]")
    check_agent(tmp_path, "environment=verifiers", f"environment.options.python={PYTHON}", *words)


OWN_RANKS = ("algorithm.critic.place=own_ranks", "resources.learner.num_workers=1", "resources.critic.num_workers=2")
PLACES = {"learner_ranks": (), "own_ranks": OWN_RANKS}


@pytest.fixture(
    scope="module",
    params=["learner_ranks", pytest.param("own_ranks", marks=[pytest.mark.matrix, pytest.mark.exhaustive])],
)
def critic_job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """One vLLM engine and two FSDP2 ranks, or one of the policy and two of the critic; the first of three steps trains
    the critic alone."""
    folder = tmp_path_factory.mktemp("ppo_gae")
    words = (
        "experiment=digits", "algorithm=ppo_gae", "resources=laptop", "num_steps=3", f"data.path={folder / 'digits'}",
        "algorithm.critic.warmup_steps=1", "learner.warmup_steps=0", "resources.rollout.num_workers=1",
        "weight_sync.canary_interval=1",
    )  # fmt: skip
    with Job(folder, (*words, *PLACES[request.param])) as critic_job:
        critic_job.finish(critic_job.start())
        yield critic_job


@pytest.fixture(scope="module")
def critic_report(critic_job: Job) -> RunFolder:
    return critic_job.done(3)


def test_the_critic_is_trained_in_every_step_and_the_policy_after_its_warm_up(critic_report: RunFolder) -> None:
    steps = [step.values for step in critic_report.steps]
    assert [step["learning_rate"] > 0 for step in steps] == [False, True, True]
    for step in steps:
        assert step["value_loss"] > 0 and step["critic_grad_norm"] > 0 and step["critic_learning_rate"] > 0
        assert math.isfinite(step["explained_variance"]) and 0 <= step["value_clip_fraction"] <= 1
        assert step["skipped"] == step["critic_skipped"] == 0
    assert steps[1]["kl"] == pytest.approx(0, abs=1e-4), "the policy is still its reference"


def test_the_engine_follows_the_policy(critic_report: RunFolder) -> None:
    assert critic_report.summary.logprob_gap_max <= 1e-3 and 0 < critic_report.summary.canary_max <= 1e-5
    assert critic_report.summary.weight_syncs == 4


def test_the_critic_is_part_of_each_checkpoint_and_the_policy_leaves_without_it(critic_job: Job) -> None:
    for version in ("000000", "000003"):
        learner = critic_job.run_folder / "checkpoints" / f"step-{version}" / "learner"
        assert (learner / "critic" / "state.json").is_file()
    start, trained = (load_file(critic_job.run_folder / name / "model.safetensors") for name in ("reference", "policy"))
    assert start.keys() == trained.keys() == load_file(critic_job.folder / "model" / "model.safetensors").keys()
    assert any((start[name] != trained[name]).any() for name in start)


def test_the_report_has_the_curves_of_the_critic(critic_job: Job) -> None:
    page = (critic_job.run_folder / "report.html").read_text()
    assert "Value loss" in page and "Explained variance" in page


NUM_DISTILLATION_STEPS = 12

DISTILLATION_WORDS = (
    "experiment=digits", "algorithm=distill", "resources=laptop_overlapped", "learner=single",
    "warm_start.num_steps=0", f"num_steps={NUM_DISTILLATION_STEPS}",
    "learner.learning_rate=3e-3", "learner.warmup_steps=0",
    "algorithm.prompts_per_step=8", "algorithm.samples_per_prompt=8",
)  # fmt: skip


def test_the_policy_approaches_a_teacher_whose_rewards_it_never_sees(tmp_path: Path) -> None:
    """`kl` is the divergence of the policy from the teacher on its own samples: of random weights it falls at once."""
    teacher = write_tiny_qwen2_5_vl(tmp_path / "teacher", seed=1)
    own = (f"data.path={tmp_path / 'digits'}", f"algorithm.distillation.teacher={teacher}")
    with Job(tmp_path, (*DISTILLATION_WORDS, *own)) as job:
        found = job.trained(NUM_DISTILLATION_STEPS)
        none_left(job.marks[0])
    assert found.faults == []
    assert found.summary.logprob_gap_mean <= 1e-5
    kl = [step.values["kl"] for step in found.steps]
    assert sum(kl[-3:]) < 0.6 * sum(kl[:3]), kl


def test_the_run_ends_and_engine_and_learner_agree_on_every_sampled_token(tmp_path: Path) -> None:
    """One vLLM engine and two FSDP2 ranks; few seeds, and a short warm start."""
    words = ("experiment=calculator", "resources=laptop", "num_steps=3", "algorithm.drop_uniform_groups=false")
    few = ("environment.num_train=64", "environment.num_validation=8", "environment.num_test=8")
    short = ("warm_start.num_steps=10", "warm_start.check_interval=10", "resources.rollout.num_workers=1")
    with Job(tmp_path, (*words, *few, *short)) as job:
        assert job.trained(3).summary.logprob_gap_max <= 1e-3
