"""What is computed over a whole step is the same on two ranks and in one process: scores, selection, moments."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from backend_run import LORA, config_of, equal, train

from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WORDS = (
    "algorithm=reinforce_pp_baseline", "algorithm.kl.coef=0", "algorithm.num_epochs=2", "algorithm.num_minibatches=2",
    "algorithm.old_logprobs=recomputed", "algorithm.correction=tis_token", "algorithm.entropy.top_share=0.5",
    "algorithm.entropy.bonus=0.01", "algorithm.shaping.running_moments=standardise",
    "algorithm.loss_aggregation=sequence_sum_token_norm", "algorithm.loss_norm=8",
)  # fmt: skip
TWO = ("learner=fsdp2", "resources.learner.num_workers=2")
MUON = ("learner.optimizer=muon",)  # torch iterates in bfloat16: rounding is of the order of 1e-2 of a step


def _rank(rank: int, model: Path, words: tuple[str, ...], out: Path) -> None:
    torch.set_num_threads(1)
    train(config_of(model, *words, *TWO), rank, 2, out)


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The norm of the difference of all weights."""
    return sum((a[name] - b[name]).square().sum().item() for name in a) ** 0.5


BYTES = ("learner.optimizer=adamw_8bit",)  # blocks of 256 values begin at other places on two ranks
CASES = {"algorithm": (WORDS, 0.01), "muon": (MUON, 0.05), "adamw_8bit": (BYTES, 0.1)}
OFF = (*LORA, "warm_start=none", "algorithm.kl.coef=0.5", "reference.place=learner_ranks")
RARE = [pytest.param(OFF, 0.01, marks=pytest.mark.matrix, id="adapters off")]


@pytest.mark.parametrize(("words", "share"), [*(pytest.param(*case, id=name) for name, case in CASES.items()), *RARE])
def test_two_ranks_train_as_one_process_does_and_resume_exactly(
    tmp_path: Path, words: tuple[str, ...], share: float
) -> None:
    model = write_tiny_qwen2_5_vl(tmp_path / "model", seed=0)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    train(config_of(model, *words), 0, 1, tmp_path / "one")
    multiprocessing.set_forkserver_preload(["backend_run"])
    mp.start_processes(_rank, args=(model, words, tmp_path / "two"), nprocs=2, start_method="forkserver")
    one, two = (torch.load(tmp_path / name / "seen.pt") for name in ("one", "two"))
    assert distance(one["weights"], two["weights"]) < share * distance(one["weights"], one["before"])
    for step in range(2):
        found, expected = (  # siblings on two ranks share less
            {name: value for name, value in side["metrics"][step].items() if name != "shared_prompt_share"}
            for side in (two, one)
        )
        assert found == pytest.approx(expected, rel=share, abs=1e-3)
    assert equal(two["third_again"], two["third"], atol=0), "the moments came back with the checkpoint"
    assert two["metrics_again"] == two["metrics"], "and began again with the first one"
