"""Two ranks train policy and critic as one process does: FSDP2, and DeepSpeed ZeRO at either stage."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from backend_run import config_of, connected, equal, leave, steps, weights, without_sharing
from learner_data import cut_off, image, prompt, random_groups, tiny_config
from one_learner import at_hand, saved
from transformers import AutoTokenizer

from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.configs.schema import RunConfig
from mobula.learner.batch import fetch_items
from mobula.learner.examples import Example
from mobula.learner.learner import Learner
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WORDS = (
    "algorithm=ppo_gae", "algorithm.kl.coef=0", "algorithm.num_epochs=2", "algorithm.num_minibatches=2",
    "algorithm.critic.learning_rate=1e-3", "algorithm.critic.warmup_steps=1",
)  # fmt: skip
BACKENDS = {
    "fsdp2": ("learner=fsdp2",),
    "halves of rows": ("learner=fsdp2", "learner.sequence_parallel=2"),
    "zero_2": ("learner=deepspeed", "learner.zero_stage=2"),
    "zero_3": ("learner=deepspeed", "learner.zero_stage=3"),
}


def train(config: RunConfig, rank: int, world_size: int, out: Path) -> None:
    """One rank; rank 0 writes what it saw."""
    tokenizer = AutoTokenizer.from_pretrained(config.policy.model)
    learner = connected(Learner(config, rank, world_size, (250,)), rank, world_size, out / "address")
    updates = [[cut_off(groups[0]), *groups[1:]] for groups in steps(tokenizer)]
    leave(learner, rank, follow(learner, [*updates, updates[0]], tokenizer, out), out / "seen.pt")


def follow(learner: Learner, updates: list[list[ScoredGroup]], tokenizer, out: Path) -> dict:
    """RL begins from a supervised step; two updates, save, a third one; load, and the third one again."""
    answer = np.array([1, 2, 3], np.int32)
    asked = [prompt(tokenizer, "a", [image(9)]), prompt(tokenizer, "b")]
    learner.supervised_step(at_hand([Example.of_answer(a, TokenActions(answer), answer > 0) for a in asked]))
    before = values(learner, updates[1])
    learner.begin_rl()
    seen = {"before": before, "start": values(learner, updates[1]), "policy_before": weights(learner)}
    seen["metrics"] = [dict(learner.update(groups, n + 1).metrics) for n, groups in enumerate(updates[:2])]
    seen |= {"policy": weights(learner), "values": values(learner, updates[1])}
    saved(learner, out / "state")
    seen["third"] = (dict(learner.update(updates[2], 3).metrics), weights(learner), values(learner, updates[1]))
    learner.load(out / "state")
    seen["reloaded"] = values(learner, updates[1])
    seen["again"] = (dict(learner.update(updates[2], 3).metrics), weights(learner), values(learner, updates[1]))
    return seen


def values(learner: Learner, groups: list[ScoredGroup]) -> torch.Tensor:
    """Of every token of these groups, one after the other; every rank has all of them."""
    valued = learner._critic.valued(fetch_items(groups, 0, 1.0))
    return torch.from_numpy(np.concatenate([item.values for row in valued for item in row]))


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
    scope="module", params=["fsdp2", "halves of rows", "zero_3", pytest.param("zero_2", marks=pytest.mark.matrix)]
)
def two(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    out = tmp_path_factory.mktemp(request.param)
    multiprocessing.set_forkserver_preload(["backend_run", "deepspeed"])  # imported once, not by every rank
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


TEN_STEPS = (
    "algorithm=ppo_gae", "algorithm.kl.coef=0", "algorithm.critic.learning_rate=1e-3", "algorithm.max_staleness=99",
    "learner.tokens_per_microbatch=120",
    "learner.adam_eps=1.0e-4",  # at 1e-8 rounding of a gradient near 0 becomes a step as large as the learning rate
)  # fmt: skip
CURVES = ("loss", "value_loss", "entropy", "grad_norm", "critic_grad_norm", "explained_variance", "response_length")


def train_ten_steps(rank: int, world_size: int, model: Path, words: tuple[str, ...], out: Path) -> None:
    """Ten updates, each with groups of its own; rank 0 writes what came out."""
    if world_size > 1:
        torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    config = tiny_config(model, *TEN_STEPS, *words, f"resources.learner.num_workers={world_size}")
    learner = connected(Learner(config, rank, world_size, (250,)), rank, world_size, out / "address")
    learner.begin_rl()
    seen = {"before": weights(learner)}
    updates = [random_groups(tokenizer, 4, 3, seed=10 * n) for n in range(10)]
    seen["metrics"] = [dict(learner.update(groups, n + 1).metrics) for n, groups in enumerate(updates)]
    seen["weights"] = weights(learner)
    leave(learner, rank, seen, out / "seen.pt")


@pytest.fixture(scope="module")
def ten_steps(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    out = tmp_path_factory.mktemp("ten")
    train_ten_steps(0, 1, model, (), out)
    return torch.load(out / "seen.pt")


@pytest.mark.matrix
@pytest.mark.parametrize("backend", ["fsdp2", "zero_2", "zero_3"])
def test_ranks_have_the_curves_of_one_process(ten_steps: dict, model: Path, tmp_path: Path, backend: str) -> None:
    multiprocessing.set_forkserver_preload(["backend_run", "deepspeed"])
    args = (2, model, BACKENDS[backend], tmp_path)
    mp.start_processes(train_ten_steps, args=args, nprocs=2, start_method="forkserver")
    found = torch.load(tmp_path / "seen.pt")
    for ours, theirs in zip(found["metrics"], ten_steps["metrics"], strict=True):
        assert {n: ours[n] for n in CURVES} == pytest.approx({n: theirs[n] for n in CURVES}, rel=2e-3, abs=1e-4)
    assert equal(found["weights"], ten_steps["weights"], atol=5e-5)
    assert not equal(ten_steps["weights"], ten_steps["before"], atol=1e-3)
