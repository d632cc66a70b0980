"""Two ranks train policy and critic as one process does: FSDP2, and DeepSpeed ZeRO at either stage."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from backend_run import config_of, equal, met_at, weights, without_sharing
from critic_run import WORDS, train
from learner_data import random_groups, tiny_config
from transformers import AutoTokenizer

from mobula.configs.schema import RunConfig
from mobula.learner.learner import Learner
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BACKENDS = {
    "fsdp2": ("learner=fsdp2",),
    "halves of rows": ("learner=fsdp2", "learner.sequence_parallel=2"),
    "zero_2": ("learner=deepspeed", "learner.zero_stage=2"),
    "zero_3": ("learner=deepspeed", "learner.zero_stage=3"),
}


def _rank(rank: int, model: Path, words: tuple[str, ...], out: Path) -> None:
    torch.set_num_threads(1)
    train(config_of(model, *WORDS, *words, "resources.learner.num_workers=2"), rank, 2, out)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny") / "model", seed=0)


@pytest.fixture(scope="module")
def one(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    out = tmp_path_factory.mktemp("one")
    train(config_of(model, *WORDS), 0, 1, out)
    return torch.load(out / "seen.pt")


@pytest.fixture(
    scope="module", params=["fsdp2", "halves of rows", "zero_3", pytest.param("zero_2", marks=pytest.mark.exhaustive)]
)
def two(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    out = tmp_path_factory.mktemp(request.param)
    multiprocessing.set_forkserver_preload(["critic_run", "deepspeed"])  # imported once, not by every rank
    mp.start_processes(_rank, args=(model, BACKENDS[request.param], out), nprocs=2, start_method="forkserver")
    return torch.load(out / "seen.pt")


def test_two_ranks_end_with_the_policy_and_the_values_of_one_process(one: dict, two: dict) -> None:
    """LightRFT defects B1, B9: no RL on DeepSpeed, and no clipped policy beside a critic on FSDP."""
    for name in ("start", "values"):
        torch.testing.assert_close(two[name], one[name], atol=1e-5, rtol=0)
    assert (one["values"] - one["start"]).abs().max() > 1e-2, "the critic learnt something"
    assert (one["start"] - one["before"]).abs().max() > 1e-5, "it took the warm start over"
    assert equal(two["policy"], one["policy"], atol=5e-6)
    assert not equal(one["policy"], one["policy_before"], atol=1e-4)


def test_metrics_are_those_of_the_whole_batch(one: dict, two: dict) -> None:
    """LightRFT defect B24: metrics were those of one rank."""
    for found, expected in zip([*two["metrics"], two["third"][0]], [*one["metrics"], one["third"][0]], strict=True):
        assert without_sharing(found) == pytest.approx(without_sharing(expected), rel=1e-3, abs=2e-5)
    assert {"value_loss", "value_clip_fraction", "explained_variance", "critic_grad_norm"} <= one["metrics"][0].keys()
    assert "clip_fraction" not in one["metrics"][0] and "clip_fraction" in one["metrics"][1], "a step of warm-up"


def test_two_ranks_go_on_from_a_checkpoint_exactly(one: dict, two: dict) -> None:
    for seen in (one, two):
        assert torch.equal(seen["reloaded"], seen["values"])
        metrics, policy, values = seen["third"]
        metrics_again, policy_again, values_again = seen["again"]
        assert metrics_again == metrics and equal(policy_again, policy, atol=0)
        assert torch.equal(values_again, values) and not torch.equal(values, seen["values"])


NUM_STEPS = 10

TEN_STEP_WORDS = (
    "algorithm=ppo_gae", "algorithm.kl.coef=0", "algorithm.critic.learning_rate=1e-3", "algorithm.max_staleness=99",
    "learner.tokens_per_microbatch=120",
    "learner.adam_eps=1.0e-4",  # at 1e-8 rounding of a gradient near 0 becomes a step as large as the learning rate
)  # fmt: skip

CURVES = ("loss", "value_loss", "entropy", "grad_norm", "critic_grad_norm", "explained_variance", "response_length")


def train_ten_steps(config: RunConfig, rank: int, world_size: int, out: Path) -> None:
    """Ten updates, each with groups of its own; rank 0 writes what came out."""
    tokenizer = AutoTokenizer.from_pretrained(config.policy.model)
    learner = Learner(config, rank, world_size, (250,))
    learner.connect(met_at(learner, rank, out / "address") if world_size > 1 else "")
    learner.begin_rl()
    seen = {"before": weights(learner)}
    steps = [random_groups(tokenizer, 4, 3, seed=10 * n) for n in range(NUM_STEPS)]
    seen["metrics"] = [dict(learner.update(groups, n + 1).metrics) for n, groups in enumerate(steps)]
    seen["weights"] = weights(learner)
    if rank == 0:
        torch.save(seen, out / "seen.pt")
    learner.close()


def _ten_steps_rank(rank: int, model: Path, words: tuple[str, ...], out: Path) -> None:
    torch.set_num_threads(1)
    train_ten_steps(tiny_config(model, *TEN_STEP_WORDS, *words, "resources.learner.num_workers=2"), rank, 2, out)


@pytest.fixture(scope="module")
def ten_steps_on_one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """The model, and what one process made of it."""
    out = tmp_path_factory.mktemp("one")
    model = write_tiny_qwen2_5_vl(out / "model", seed=0)
    train_ten_steps(tiny_config(model, *TEN_STEP_WORDS), 0, 1, out)
    return model, torch.load(out / "seen.pt")


@pytest.mark.matrix
@pytest.mark.parametrize("backend", ["fsdp2", "zero_2", "zero_3"])
def test_a_backend_has_one_process_s_curve(ten_steps_on_one: tuple[Path, dict], tmp_path: Path, backend: str) -> None:
    model, expected = ten_steps_on_one
    multiprocessing.set_forkserver_preload(["backend_run", "deepspeed"])
    mp.start_processes(_ten_steps_rank, args=(model, BACKENDS[backend], tmp_path), nprocs=2, start_method="forkserver")
    found = torch.load(tmp_path / "seen.pt")
    for ours, theirs in zip(found["metrics"], expected["metrics"], strict=True):
        assert {n: ours[n] for n in CURVES} == pytest.approx({n: theirs[n] for n in CURVES}, rel=2e-3, abs=1e-4)
    assert equal(found["weights"], expected["weights"], atol=5e-5)
    assert not equal(expected["weights"], expected["before"], atol=1e-3)
