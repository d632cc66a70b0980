"""What is computed over a whole step is the same on two ranks and in one process: scores, selection, moments,
supervised rows beside an RL step, offline jobs. Two ranks go on from a checkpoint exactly."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from backend_run import LORA, config_of, equal, followed, steps, train, without_sharing
from offline_rows import JOBS, rows
from offline_rows import config_of as offline_config_of
from transformers import AutoTokenizer

from mobula.configs.schema import RunConfig
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WORDS = (
    "algorithm=reinforce_pp_baseline", "algorithm.kl.coef=0", "algorithm.num_epochs=2", "algorithm.num_minibatches=2",
    "algorithm.old_logprobs=recomputed", "algorithm.correction=tis_token", "algorithm.entropy.top_share=0.5",
    "algorithm.entropy.bonus=0.01", "algorithm.shaping.running_moments=standardise",
    "algorithm.loss_aggregation=sequence_sum_token_norm", "algorithm.loss_norm=8",
)  # fmt: skip
TWO_RANKS = "resources.learner.num_workers=2"
FSDP2, STAGE_2, STAGE_3 = (
    ("learner=fsdp2",),
    ("learner=deepspeed", "learner.zero_stage=2"),
    ("learner=deepspeed", "learner.zero_stage=3"),
)


def on_two_ranks(work: Callable[..., None], *arguments: Any) -> None:
    multiprocessing.set_forkserver_preload(["backend_run", "offline_rows", "mobula.learner.offline"])
    mp.start_processes(work, args=arguments, nprocs=2, start_method="forkserver")


def of_one_and_two(folder: Path) -> tuple[dict, dict]:
    """What one process saw, and two ranks."""
    one, two = (torch.load(folder / name / "seen.pt") for name in ("one", "two"))
    return one, two


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    return write_tiny_qwen2_5_vl(tmp_path / "model", seed=0)


def _rank(rank: int, model: Path, words: tuple[str, ...], out: Path) -> None:
    torch.set_num_threads(1)
    train(config_of(model, *words, *FSDP2, TWO_RANKS), rank, 2, out)


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The norm of the difference of all weights."""
    return sum((a[name] - b[name]).square().sum().item() for name in a) ** 0.5


MUON = ("learner.optimizer=muon",)  # torch iterates in bfloat16: rounding is of the order of 1e-2 of a step
BYTES = ("learner.optimizer=adamw_8bit",)  # blocks of 256 values begin at other places on two ranks
CASES = {"algorithm": (WORDS, 0.01), "muon": (MUON, 0.05), "adamw_8bit": (BYTES, 0.1)}
OFF = (*LORA, "warm_start=none", "algorithm.kl.coef=0.5", "reference.place=learner_ranks")
RARE = [pytest.param(OFF, 0.01, marks=pytest.mark.matrix, id="adapters off")]


@pytest.mark.parametrize(("words", "share"), [*(pytest.param(*case, id=name) for name, case in CASES.items()), *RARE])
def test_two_ranks_train_and_resume_as_one(model: Path, tmp_path: Path, words: tuple[str, ...], share: float) -> None:
    train(config_of(model, *words), 0, 1, tmp_path / "one")
    on_two_ranks(_rank, model, words, tmp_path / "two")
    one, two = of_one_and_two(tmp_path)
    assert distance(one["weights"], two["weights"]) < share * distance(one["weights"], one["before"])
    for found, expected in zip(two["metrics"], one["metrics"], strict=True):
        assert without_sharing(found) == pytest.approx(without_sharing(expected), rel=share, abs=1e-3)
    assert equal(two["third_again"], two["third"], atol=0), "the moments came back with the checkpoint"
    assert two["metrics_again"] == two["metrics"], "and began again with the first one"


MIXED = (
    "algorithm.supervised.path=rows", "algorithm.supervised.coef=0.5", "algorithm.supervised.batch_size=3",
    "algorithm.num_minibatches=2",
)  # fmt: skip
PADDED = "learner.packing=false"


def train_mixed(config: RunConfig, rank: int, world_size: int, out: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(config.policy.model)
    first, second = steps(tokenizer)
    beside = [rows(tokenizer, "sft", num=6, seed=seed) for seed in range(3)]
    updates = [(groups, {"supervised": own}) for groups, own in zip((first, second, first), beside, strict=True)]
    followed(config, rank, world_size, out, updates, banned_ids=(250,))


def _mixed_rank(rank: int, model: Path, words: tuple[str, ...], out: Path) -> None:
    torch.set_num_threads(1)
    train_mixed(config_of(model, TWO_RANKS, *MIXED, *words), rank, 2, out)


@pytest.mark.matrix
@pytest.mark.parametrize("words", [FSDP2, (*FSDP2, PADDED), STAGE_3], ids=["fsdp2", "padded", "stage 3"])
def test_supervised_rows_beside_steps_train_on_two_ranks(model: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    train_mixed(config_of(model, *MIXED, PADDED), 0, 1, tmp_path / "one")
    on_two_ranks(_mixed_rank, model, words, tmp_path / "two")
    one, two = of_one_and_two(tmp_path)
    assert_equal(one, two, "supervised rows")
    assert all(metrics["supervised_loss"] > 1 for metrics in two["metrics"])


def assert_equal(one: dict, two: dict, what: str) -> None:
    # The bias of keys has no gradient but rounding, which Adam scales up: 2.3e-5 on ZeRO-3.
    assert equal(one["weights"], two["weights"], atol=5e-5), what
    assert not equal(one["weights"], one["before"], atol=1e-4), what
    for found, expected in zip(two["metrics"], one["metrics"], strict=True):
        assert without_sharing(found) == pytest.approx(without_sharing(expected), rel=1e-3, abs=1e-4), what
        assert all(math.isfinite(value) for value in found.values()), what
    assert equal(two["third_again"], two["third"], atol=0), what


def train_offline(config: RunConfig, job: str, rank: int, world_size: int, out: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(config.policy.model)
    updates = [(rows(tokenizer, job, num=5, seed=seed), {}) for seed in range(3)]
    followed(config, rank, world_size, out, updates, assesses=True)


def _offline_rank(rank: int, model: Path, words: tuple[str, ...], jobs: tuple[str, ...], out: Path) -> None:
    torch.set_num_threads(1)
    for job in jobs:
        train_offline(offline_config_of(model, job, TWO_RANKS, *words), job, rank, 2, out / job / "two")


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(FSDP2, id="fsdp2"),
        pytest.param((*FSDP2, "learner.sequence_parallel=2"), id="halves of rows"),
        pytest.param(STAGE_2, marks=pytest.mark.matrix, id="stage 2"),
        pytest.param(STAGE_3, marks=pytest.mark.matrix, id="stage 3"),
    ],
)
def test_two_ranks_train_an_offline_job_as_one_process(model: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    for job in JOBS:
        for name in ("one", "two"):
            (tmp_path / job / name).mkdir(parents=True)
        train_offline(offline_config_of(model, job), job, 0, 1, tmp_path / job / "one")
    # DeepSpeed keeps its settings for a whole process: each job there has processes of its own.
    for jobs in [tuple(JOBS)] if FSDP2[0] in words else [(job,) for job in JOBS]:
        on_two_ranks(_offline_rank, model, words, jobs, tmp_path)
    for job in JOBS:
        one, two = of_one_and_two(tmp_path / job)
        assert equal(one["before"], two["before"], atol=0), f"{job}: every rank draws the same head"
        assert two["assessed"] == pytest.approx(one["assessed"], rel=1e-3, abs=1e-4), job
        assert_equal(one, two, job)
