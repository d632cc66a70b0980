"""Two ranks train an offline job as one process does, and go on from a checkpoint exactly."""

from __future__ import annotations

import math
import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from backend_run import equal, met_at, weights
from offline_rows import JOBS, config_of, rows
from transformers import AutoTokenizer

from mobula.configs.schema import RunConfig
from mobula.learner.learner import Learner
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BACKENDS = {
    "fsdp2": ("learner=fsdp2",),
    "halves of rows": ("learner=fsdp2", "learner.sequence_parallel=2"),
    "stage 2": ("learner=deepspeed", "learner.zero_stage=2"),
    "stage 3": ("learner=deepspeed", "learner.zero_stage=3"),
}


def train(config: RunConfig, job: str, rank: int, world_size: int, out: Path) -> None:
    """Two steps, a checkpoint, a third step; back to the checkpoint, and the third step again."""
    tokenizer = AutoTokenizer.from_pretrained(config.policy.model)
    groups = [rows(tokenizer, job, num=5, seed=seed) for seed in range(3)]
    learner = Learner(config, rank, world_size, ())
    learner.connect(met_at(learner, rank, out / "address") if world_size > 1 else "")
    seen = {"before": weights(learner), "assessed": dict(learner.assess(groups[2]))}
    seen["metrics"] = [dict(learner.update(groups[n], n + 1).metrics) for n in range(2)]
    seen["weights"] = weights(learner)
    learner.save(out / "state")
    learner.finish_save()
    learner.update(groups[2], 3)
    seen["third"] = weights(learner)
    learner.load(out / "state")
    learner.update(groups[2], 3)
    seen["third_again"] = weights(learner)
    if rank == 0:
        torch.save(seen, out / "seen.pt")
    learner.close()


def _rank(rank: int, model: Path, words: tuple[str, ...], jobs: tuple[str, ...], out: Path) -> None:
    torch.set_num_threads(1)
    for job in jobs:
        train(config_of(model, job, "resources.learner.num_workers=2", *words), job, rank, 2, out / job)


@pytest.mark.parametrize(
    "backend",
    ["fsdp2", "halves of rows", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("stage 2", "stage 3"))],
)
def test_two_ranks_train_as_one_process_does_and_resume_exactly(tmp_path: Path, backend: str) -> None:
    model = write_tiny_qwen2_5_vl(tmp_path / "model", seed=0)
    for job in JOBS:
        for name in ("one", "two"):
            (tmp_path / name / job).mkdir(parents=True)
        train(config_of(model, job), job, 0, 1, tmp_path / "one" / job)
    multiprocessing.set_forkserver_preload(["offline_rows", "mobula.learner.offline"])
    # DeepSpeed keeps its settings for a whole process: each job there has processes of its own.
    together = [tuple(JOBS)] if "learner=fsdp2" in BACKENDS[backend] else [(job,) for job in JOBS]
    for jobs in together:
        arguments = (model, BACKENDS[backend], jobs, tmp_path / "two")
        mp.start_processes(_rank, args=arguments, nprocs=2, start_method="forkserver")
    for job in JOBS:
        one, two = (torch.load(tmp_path / name / job / "seen.pt") for name in ("one", "two"))
        assert equal(one["before"], two["before"], atol=0), f"{job}: every rank draws the same head"
        # The bias of keys has no gradient but rounding, which Adam scales up: 2.3e-5 on ZeRO-3.
        assert equal(one["weights"], two["weights"], atol=5e-5), job
        assert not equal(one["weights"], one["before"], atol=1e-4), job
        assert two["assessed"] == pytest.approx(one["assessed"], rel=1e-3, abs=1e-4), job
        for step in range(2):
            assert two["metrics"][step] == pytest.approx(one["metrics"][step], rel=1e-3, abs=1e-4), job
        assert equal(two["third_again"], two["third"], atol=0), job
        assert all(math.isfinite(value) for value in two["metrics"][1].values()), job
