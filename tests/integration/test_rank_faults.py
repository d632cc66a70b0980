"""A rank that trains, or the driver, is killed in the middle of a step: the run ends with policy and critic of a run
without faults, bit for bit. Ranks share rows, hold replicas of the model, or train a critic on its own ranks."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import REPEATABLE, Job, in_order, none_left, trained_places
from runs import audited
from sabotage import Saboteur
from safetensors.torch import load_file
from struck_roles import SABOTAGE
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mobula.cluster.metrics.report.run_folder import RunFolder, read_run_folder
from mobula.cluster.recovery.checkpoints import newest_learner_state
from mobula.learner.rank import load_algorithm
from mobula.learner.state_files import read_index, read_state

pytestmark = [pytest.mark.matrix, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]

SCRIPT = Path(__file__).with_name("replaced_job.py")
STRUCK = "Learner=struck_ranks:StruckLearner,CriticRank=struck_ranks:StruckCritic"
NUM_STEPS = 6
WORDS = (*REPEATABLE, "resources.rollout.num_workers=1", "algorithm.num_minibatches=2", "learner.warmup_steps=0")
WORDS += ("algorithm.kl.coef=0.1", "algorithm.kl.controller=adaptive", "algorithm.kl.horizon=50", "resume=auto")
WORDS += ("algorithm.shaping.running_moments=scale", f"num_steps={NUM_STEPS}")
OWN_RANKS = ("algorithm.critic.place=own_ranks", "resources.critic.num_workers=2")
CRITIC, FOUR_BITS = "critic on its own ranks", "base of 4 bits"
QUANTISED = ("policy.quantisation=nf4", "policy.lora.rank=4", "weight_sync.payload=adapters", "learner=fsdp2")
RANKS = {  # name -> overrides, and the faults of a run
    CRITIC: (
        ("algorithm=ppo_gae", "algorithm.critic.warmup_steps=1", *OWN_RANKS),
        [("critic_trains_2", "critic/1"), ("learner_trains_4", "learner/0"), ("critic_values_5", "critic/0")],
    ),
    "halves of rows": (
        ("learner.sequence_parallel=2",),
        [("learner_computes_2", "learner/1"), ("learner_trains_4", "learner/0")],
    ),
    "two replicas": (
        ("resources.learner.num_workers=4", "resources.learner.num_cpus=0.15", "resources.learner.replicas=2"),
        [("learner_computes_2", "learner/2"), ("learner_trains_4", "learner/1")],
    ),
    FOUR_BITS: (QUANTISED, [("learner_computes_2", "learner/1"), ("learner_trains_4", "learner/0")]),
}
STEP_VALUES = ("loss", "kl", "kl_coef", "grad_norm", "value_loss", "critic_grad_norm", "explained_variance")


@dataclass(frozen=True)
class Ended:
    """What a run left: its report, the groups of each step, and the newest state of all that is trained."""

    job: Job
    report: RunFolder
    trained: list[list[int]]  # places of the prompts in the first epoch, by step
    policy: dict[str, torch.Tensor]
    state: dict[str, Any]


def ended(job: Job) -> Ended:
    newest = newest_learner_state(job.run_folder / "checkpoints")
    assert newest[0] == NUM_STEPS
    folder = newest[1]
    parts = {
        name: _loaded(folder / place)
        for name, place in (("policy", "."), ("critic", "critic"))
        if (folder / place).exists()
    }
    return Ended(
        job,
        read_run_folder(job.run_folder),
        trained_places(job.run_folder),
        load_file(job.run_folder / "policy" / "model.safetensors"),
        {**parts, "algorithm": load_algorithm(folder)},
    )


def _loaded(folder: Path) -> dict[str, Any]:
    """The weights, the optimizer's state and the values that all ranks wrote to `folder`."""
    index = read_index(folder)
    state: dict[str, Any] = {
        name: torch.empty(saved.size, dtype=saved.properties.dtype) if isinstance(saved, TensorStorageMetadata) else 0
        for name, saved in index.state_dict_metadata.items()
    }
    read_state(state, folder, index, no_dist=True)
    return state


def job_in(folder: Path, ranks: str = CRITIC) -> Job:
    overrides, _ = RANKS[ranks]
    return Job(folder, (*WORDS, *overrides, f"data.path={folder / 'digits'}"))


def start(job: Job) -> subprocess.Popen[str]:
    """The job whose ranks, or whose driver, meet the faults that are planned in its folder."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(SABOTAGE, str(job.folder))
        process = job.start(str(SCRIPT), STRUCK)
    Saboteur(job.folder).enlist("driver", process.pid)
    return process


@pytest.fixture(scope="module", params=[CRITIC])
def unharmed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    with job_in(tmp_path_factory.mktemp("unharmed"), request.param) as job:
        job.finish(start(job))
        yield ended(job)


def assert_is_the_same(found: Ended, expected: Ended) -> None:
    assert (found.report.summary.status, found.report.summary.version) == ("done", NUM_STEPS)
    assert found.trained == in_order(NUM_STEPS)
    assert found.job.steps == list(range(1, NUM_STEPS + 1))
    assert _values(found) == _values(expected)
    assert found.policy.keys() == expected.policy.keys()
    assert all(torch.equal(tensor, expected.policy[name]) for name, tensor in found.policy.items())
    if "critic" in expected.state:
        assert {name.partition(".")[0] for name in found.state["critic"]} == {"model", "optimizer", "version"}
    assert _same(found.state, expected.state)


def _values(run: Ended) -> list[dict[str, float]]:
    """Of each step; where the critic trains alone the policy has none."""
    return [{name: step.values[name] for name in STEP_VALUES if name in step.values} for step in run.report.steps]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_there_is_something_to_lose(unharmed: Ended) -> None:
    steps = [step.values for step in unharmed.report.steps]
    assert len({step["kl_coef"] for step in steps}) >= NUM_STEPS - 2
    assert len({step["value_loss"] for step in steps}) == NUM_STEPS
    assert [step["learning_rate"] > 0 for step in steps] == [False] + [True] * (NUM_STEPS - 1)
    assert steps[-1]["optimizer_steps"] == 4, "two of each model"


@pytest.mark.parametrize(("unharmed", "ranks"), [(name, name) for name in RANKS], indirect=["unharmed"])
def test_a_rank_that_is_killed_in_a_step_costs_nothing_but_time(unharmed: Ended, ranks: str, tmp_path: Path) -> None:
    """All ranks, those of a critic too, go back to the newest checkpoint, and the steps after it are repeated."""
    job, saboteur, (_, faults) = job_in(tmp_path, ranks), Saboteur(tmp_path), RANKS[ranks]
    for moment, victim in faults:
        saboteur.plan(moment, victim=victim, signal=signal.SIGKILL)
    with job:
        job.finish(start(job))
        none_left(job.marks[0])
    assert saboteur.struck == [f"{moment} {victim} 9" for moment, victim in faults]
    found = ended(job)
    assert found.report.summary.restarts == len(faults)
    audit = audited(job.run_folder)
    assert audit.findings == []
    assert audit.history.parts[0].num_restored >= 1
    assert sum(step.num_repeats for step in audit.history.steps.values()) >= 1
    assert_is_the_same(found, unharmed)


@pytest.mark.parametrize(
    ("unharmed", "ranks", "moment"),
    [
        (CRITIC, CRITIC, "critic_trains_1"),
        (CRITIC, CRITIC, "critic_trains_4"),
        (FOUR_BITS, FOUR_BITS, "learner_trains_4"),
    ],
    indirect=["unharmed"],
)
def test_a_run_that_is_killed_in_a_step_has_the_same_weights(
    unharmed: Ended, tmp_path: Path, ranks: str, moment: str
) -> None:
    """Critic or policy train on the step when its driver is killed; journal and checkpoints are what is left."""
    job, saboteur = job_in(tmp_path, ranks), Saboteur(tmp_path)
    saboteur.plan(moment, victim="driver", signal=signal.SIGKILL)
    with job:
        assert start(job).wait(600) == -signal.SIGKILL, job.output
        none_left(job.marks[0])
        job.finish(start(job))
    assert saboteur.struck == [f"{moment} driver 9"]
    audit = audited(job.run_folder)
    assert audit.findings == []
    assert [part.status for part in audit.history.parts] == [None, "done"]
    assert_is_the_same(ended(job), unharmed)


def test_the_run_is_replayed_to_the_same_weights(unharmed: Ended) -> None:
    """`mobula replay` trains the recorded groups again, with a critic on ranks of its own."""
    unharmed.job.finish(unharmed.job.start_command("replay", str(unharmed.job.run_folder)))
    assert unharmed.job.output.strip().endswith("largest difference of a weight from the run's own policy: 0")
