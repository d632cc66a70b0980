"""Two ranks train supervised rows beside an RL step as one process does, and go on from a checkpoint exactly."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from backend_run import config_of, equal, met_at, steps, weights
from offline_rows import rows
from transformers import AutoTokenizer

from mobula.configs.schema import RunConfig
from mobula.learner.learner import Learner
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.timeout(900)]

MIXED = (
    "algorithm.supervised.path=rows",
    "algorithm.supervised.coef=0.5",
    "algorithm.supervised.batch_size=3",
    "algorithm.num_minibatches=2",
)
PADDED = "learner.packing=false"
BACKENDS = {
    "fsdp2": ("learner=fsdp2",),
    "padded": ("learner=fsdp2", PADDED),
    "stage 3": ("learner=deepspeed", "learner.zero_stage=3"),
}


def train(config: RunConfig, rank: int, world_size: int, out: Path) -> None:
    """Two steps, a checkpoint, a third step; back to the checkpoint, and the third step again."""
    tokenizer = AutoTokenizer.from_pretrained(config.policy.model)
    first, second = steps(tokenizer)
    beside = [rows(tokenizer, "sft", num=6, seed=seed) for seed in range(3)]
    learner = Learner(config, rank, world_size, (250,))
    learner.connect(met_at(learner, rank, out / "address") if world_size > 1 else "")
    seen = {"before": weights(learner)}
    seen["metrics"] = [
        dict(learner.update(g, n, supervised=beside[n - 1]).metrics) for n, g in enumerate((first, second), 1)
    ]
    seen["weights"] = weights(learner)
    learner.save(out / "state")
    learner.finish_save()
    learner.update(first, 3, supervised=beside[2])
    seen["third"] = weights(learner)
    learner.load(out / "state")
    learner.update(first, 3, supervised=beside[2])
    seen["third_again"] = weights(learner)
    if rank == 0:
        torch.save(seen, out / "seen.pt")
    learner.close()


def _rank(rank: int, model: Path, words: tuple[str, ...], out: Path) -> None:
    torch.set_num_threads(1)
    train(
        config_of(model, "resources.learner.num_workers=2", "algorithm.num_minibatches=2", *MIXED, *words), rank, 2, out
    )


@pytest.mark.parametrize("words", BACKENDS.values(), ids=BACKENDS)
def test_two_ranks_train_as_one_process_does_and_resume_exactly(tmp_path: Path, words: tuple[str, ...]) -> None:
    model = write_tiny_qwen2_5_vl(tmp_path / "model", seed=0)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    train(config_of(model, *MIXED, PADDED), 0, 1, tmp_path / "one")
    multiprocessing.set_forkserver_preload(["backend_run", "offline_rows"])
    mp.start_processes(_rank, args=(model, words, tmp_path / "two"), nprocs=2, start_method="forkserver")
    one, two = (torch.load(tmp_path / name / "seen.pt") for name in ("one", "two"))
    assert equal(one["weights"], two["weights"], atol=5e-5)
    assert not equal(one["weights"], one["before"], atol=1e-4)
    for step in range(2):
        metrics = {name: value for name, value in two["metrics"][step].items() if name != "shared_prompt_share"}
        assert metrics == pytest.approx(one["metrics"][step], rel=1e-3, abs=1e-4)
        assert two["metrics"][step]["supervised_loss"] > 1
    assert equal(two["third_again"], two["third"], atol=0)
