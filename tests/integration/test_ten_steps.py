"""Ten steps of policy and critic have one curve: in one process, on FSDP2, and on DeepSpeed ZeRO at either stage."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from backend_run import equal, met_at, weights
from learner_data import random_groups, tiny_config
from transformers import AutoTokenizer

from mobula.configs.schema import RunConfig
from mobula.learner.learner import Learner
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.timeout(900)]

NUM_STEPS = 10
WORDS = (
    "algorithm=ppo_gae",
    "algorithm.kl.coef=0",
    "algorithm.critic.learning_rate=1e-3",
    "algorithm.max_staleness=99",
    "learner.tokens_per_microbatch=120",
    "learner.adam_eps=1.0e-4",  # at 1e-8 rounding of a gradient near 0 becomes a step as large as the learning rate
)
BACKENDS = {
    "fsdp2": ("learner=fsdp2",),
    "zero_2": ("learner=deepspeed", "learner.zero_stage=2"),
    "zero_3": ("learner=deepspeed", "learner.zero_stage=3"),
}
CURVES = ("loss", "value_loss", "entropy", "grad_norm", "critic_grad_norm", "explained_variance", "response_length")


def train(config: RunConfig, rank: int, world_size: int, out: Path) -> None:
    """Ten updates, each with groups of its own; rank 0 writes what came out."""
    tokenizer = AutoTokenizer.from_pretrained(config.policy.model)
    learner = Learner(config, rank, world_size, (250,))
    learner.connect(met_at(learner, rank, out / "address") if world_size > 1 else "")
    learner.begin_rl()
    before = weights(learner)
    steps = [random_groups(tokenizer, 4, 3, seed=10 * n) for n in range(NUM_STEPS)]
    metrics = [dict(learner.update(groups, n + 1).metrics) for n, groups in enumerate(steps)]
    found = {"metrics": metrics, "before": before, "weights": weights(learner)}
    if rank == 0:
        torch.save(found, out / "seen.pt")
    learner.close()


def _rank(rank: int, model: Path, words: tuple[str, ...], out: Path) -> None:
    torch.set_num_threads(1)
    train(tiny_config(model, *WORDS, *words, "resources.learner.num_workers=2"), rank, 2, out)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """The model, and what one process made of it."""
    out = tmp_path_factory.mktemp("one")
    model = write_tiny_qwen2_5_vl(out / "model", seed=0)
    train(tiny_config(model, *WORDS), 0, 1, out)
    return model, torch.load(out / "seen.pt")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_has_the_curve_of_one_process(one: tuple[Path, dict], tmp_path: Path, backend: str) -> None:
    model, expected = one
    multiprocessing.set_forkserver_preload(["backend_run", "deepspeed"])
    mp.start_processes(_rank, args=(model, BACKENDS[backend], tmp_path), nprocs=2, start_method="forkserver")
    found = torch.load(tmp_path / "seen.pt")
    for ours, theirs in zip(found["metrics"], expected["metrics"], strict=True):
        assert {n: ours[n] for n in CURVES} == pytest.approx({n: theirs[n] for n in CURVES}, rel=2e-3, abs=1e-4)
    assert equal(found["weights"], expected["weights"], atol=5e-5)
    assert not equal(expected["weights"], expected["before"], atol=1e-3)
