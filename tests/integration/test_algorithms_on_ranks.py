"""What an algorithm knows of a whole step is the same on two ranks and in one process: scores, selection, moments."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from backend_run import config_of, equal, train

from learner.policies.tiny import write_tiny_qwen2_5_vl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WORDS = (
    "algorithm=reinforce_pp_baseline",
    "algorithm.kl.coef=0",
    "algorithm.num_epochs=2",
    "algorithm.num_minibatches=2",
    "algorithm.old_logprobs=recomputed",
    "algorithm.correction=tis_token",
    "algorithm.entropy.top_share=0.5",
    "algorithm.entropy.bonus=0.01",
    "algorithm.shaping.running_moments=standardise",
    "algorithm.loss_aggregation=sequence_sum_token_norm",
    "algorithm.loss_norm=8",
)
TWO = ("learner=fsdp2", "resources.learner.num_workers=2")


def _rank(rank: int, model: Path, out: Path) -> None:
    torch.set_num_threads(1)
    train(config_of(model, *WORDS, *TWO), rank, 2, out)


def test_two_ranks_train_as_one_process_does_and_resume_exactly(tmp_path: Path) -> None:
    model = write_tiny_qwen2_5_vl(tmp_path / "model", seed=0)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    train(config_of(model, *WORDS), 0, 1, tmp_path / "one")
    multiprocessing.set_forkserver_preload(["backend_run"])
    mp.start_processes(_rank, args=(model, tmp_path / "two"), nprocs=2, start_method="forkserver")
    one, two = (torch.load(tmp_path / name / "seen.pt") for name in ("one", "two"))
    assert equal(one["weights"], two["weights"], atol=5e-6) and not equal(one["weights"], one["before"], atol=1e-4)
    for step in range(2):
        assert two["metrics"][step] == pytest.approx(one["metrics"][step], rel=1e-3, abs=1e-4)
    assert equal(two["third_again"], two["third"], atol=0), "the moments came back with the checkpoint"
    assert two["metrics_again"] == two["metrics"], "and began again with the first one"
