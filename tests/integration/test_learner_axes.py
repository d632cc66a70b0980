"""Ranks on more than one axis train as one process does: replicas of a sharded model, and parts of rows, over gloo."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from backend_run import LORA, config_of, connected, equal, steps, train
from jobs import Job
from one_learner import saved
from safetensors.torch import load_file
from transformers import AutoTokenizer

from mobula.cluster.metrics.report.run_folder import read_run_folder
from mobula.learner.backends import native
from mobula.learner.backends.sharded import saved_tensors
from mobula.learner.learner import Learner
from mobula.learner.optim import local
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl
from mobula.learner.policy_weights import export_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FOUR = ("learner=fsdp2", "resources.learner.num_workers=4")

TWO_BY_TWO = (*FOUR, "resources.learner.replicas=2")

HALVES, QUARTERS = "learner.sequence_parallel=2", "learner.sequence_parallel=4"

AVERAGE = "learner.ema_decay=0.5"

BELOW = (*LORA, "warm_start=none", "algorithm.kl.coef=0.5", "reference.place=learner_ranks")

FOUR_BITS = (*LORA, "policy.quantisation=nf4", "weight_sync.payload=adapters")

MODELS = {
    "all weights": (AVERAGE,),
    "adapters": LORA,
    "reference": BELOW,
    "4 bits": FOUR_BITS,
}  # name -> overrides on any number of ranks

AXES = {  # name -> of `MODELS`, and overrides of four ranks
    "two replicas": ("all weights", TWO_BY_TWO),
    "two replicas, adapters": ("adapters", TWO_BY_TWO),
    "quarters of rows": ("all weights", (*FOUR, QUARTERS)),
    "two replicas, halves": ("all weights", (*TWO_BY_TWO, HALVES, "learner.activation_checkpointing=blocks")),
    "halves, reference": ("reference", (*FOUR, HALVES)),
    "two replicas, 4 bits": ("4 bits", TWO_BY_TWO),
}


def _words(name: str) -> tuple[str, ...]:
    model, overrides = AXES[name]
    return (*overrides, *MODELS[model])


def _rank(rank: int, name: str, model: Path, out: Path) -> None:
    torch.set_num_threads(1)
    native.MIN_UNIT_NUMEL = 0  # every block is a unit
    native.MAX_WHOLE_GRADIENT_BYTES = 0  # gradients are sharded after every micro-batch, and summed over replicas once
    train(config_of(model, *_words(name)), rank, 4, out / name)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, below the names of `MODELS` what one process made of it, and below those of `AXES` what four ranks
    did."""
    out = tmp_path_factory.mktemp("axes")
    model = write_tiny_qwen2_5_vl(out / "model", seed=0)
    for name in (*MODELS, *AXES):
        (out / name).mkdir()
    for name, overrides in MODELS.items():
        train(config_of(model, *overrides, "learner.packing=false"), 0, 1, out / name)
    multiprocessing.set_forkserver_preload(["backend_run"])
    for name in AXES:  # in processes of their own: torch keeps the groups of a mesh for the life of a process
        mp.start_processes(_rank, args=(name, model, out), nprocs=4, start_method="forkserver")
    return out


@pytest.mark.parametrize("name", AXES)
def test_four_ranks_equal_one_process(ran: Path, name: str) -> None:
    one, four = (torch.load(ran / at / "seen.pt") for at in (AXES[name][0], name))
    assert equal(one["weights"], four["weights"], atol=1e-6)
    assert not equal(one["weights"], one["before"], atol=1e-4)
    torch.testing.assert_close(four["canary"], one["canary"], atol=1e-5, rtol=0)
    assert four["accuracy"] == one["accuracy"]
    assert four["supervised"] == pytest.approx(one["supervised"], rel=1e-4, abs=1e-6)
    for expected, metrics in zip(one["metrics"], four["metrics"], strict=True):
        assert metrics.pop("shared_prompt_share") > 0, "one process pads its rows"
        assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", AXES)
def test_a_checkpoint_and_an_export_hold_the_weights(ran: Path, name: str, tmp_path: Path) -> None:
    seen = torch.load(ran / name / "seen.pt")
    assert equal(seen["reloaded"], seen["weights"], atol=0)
    assert equal(seen["third_again"], seen["third"], atol=0)
    assert equal(seen["not_finite"], seen["third_again"], atol=0)
    config, state = config_of(ran / "model", *_words(name)), ran / name / "state"
    export_state(config, state, tmp_path, merge=True, average=False, as_trained=True)
    exported, state = (load_file(at / "model.safetensors") for at in (ran / name / "export", tmp_path))
    assert equal(exported, seen["weights"], atol=0)
    assert equal(state, exported, atol=0)


def _resave(rank: int, num_ranks: int, model: Path, source: Path, target: Path) -> None:
    torch.set_num_threads(1)
    native.MIN_UNIT_NUMEL = 0
    ranks = f"resources.learner.num_workers={num_ranks}"
    learner = Learner(config_of(model, "learner=fsdp2", ranks, AVERAGE), rank, num_ranks, (250,))
    connected(learner, rank, num_ranks, target / "address")
    learner.load(source)
    saved(learner, target / "state")
    learner.close()


def _rounded_alike(rank: int, model: Path, out: Path) -> None:
    torch.set_num_threads(1)
    native.MIN_UNIT_NUMEL = native.MAX_WHOLE_GRADIENT_BYTES = 0
    bfloat16 = ("resources.dtype=bfloat16", "learner.master_dtype=bfloat16")
    learner = connected(Learner(config_of(model, *TWO_BY_TWO, *bfloat16), rank, 4, (250,)), rank, 4, out / "address")
    before = [tensor.clone() for tensor in local(learner.backend.trained().values())]
    for version, groups in enumerate(steps(AutoTokenizer.from_pretrained(model))):
        learner.update(groups, version + 1)
    after = local(learner.backend.trained().values())
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    torch.save(after, out / f"{rank}.pt")
    learner.close()


def test_replicas_of_weights_in_bfloat16_are_rounded_alike(ran: Path, tmp_path: Path) -> None:
    mp.start_processes(_rounded_alike, args=(ran / "model", tmp_path), nprocs=4, start_method="forkserver")
    shards = [torch.load(tmp_path / f"{rank}.pt") for rank in range(4)]
    for first, second in ((0, 2), (1, 3)):
        assert all(torch.equal(a, b) for a, b in zip(shards[first], shards[second], strict=True))


def test_a_state_is_the_same_behind_two_ranks_and_four_again(ran: Path, tmp_path: Path) -> None:
    """Weights, optimizer state and average of the weights, bit for bit."""
    source = ran / "two replicas" / "state"
    for num_ranks in (4, 2, 4):
        target = tmp_path / f"{len(list(tmp_path.iterdir()))}-{num_ranks}"
        target.mkdir()
        mp.start_processes(_resave, args=(num_ranks, ran / "model", source, target), nprocs=num_ranks)
        source = target / "state"
    first, last = (_tensors(folder) for folder in (ran / "two replicas" / "state", source))
    assert first.keys() == last.keys() and any("exp_avg_sq" in name for name in first)
    assert not [name for name in first if not torch.equal(first[name], last[name])]


def _tensors(state: Path) -> dict[str, torch.Tensor]:
    """Returns each tensor of the checkpoints in a state, whole."""
    folders = [index.parent for index in state.rglob("state.json")]
    return {
        f"{folder.relative_to(state)}/{name}": read()
        for folder in folders
        for name, read in saved_tensors(folder).items()
    }


REPLICAS = ("resources.learner.num_workers=4", "resources.learner.num_cpus=0.15", "resources.learner.replicas=2")
LEARNING_AXES = {"halves of rows": (HALVES,), "two replicas": REPLICAS}

GAINS = {  # experiment -> least gain of held-out accuracy
    "digits": 0.35, "digit_list": 0.03, "sft_digits": 0.9, "dpo_digits": 0.9, "pixel_maze_ppo": 0.1,
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("axis", LEARNING_AXES)
@pytest.mark.parametrize("experiment", GAINS)
def test_a_run_learns(experiment: str, axis: str, tmp_path: Path) -> None:
    data = () if experiment == "pixel_maze_ppo" else (f"data.path={tmp_path / 'data'}",)
    words = (f"experiment={experiment}", "resources=laptop", *data, *LEARNING_AXES[axis], "checkpoints.keep=1")
    with Job(tmp_path, words, small=("metrics.progress=false",)) as job:
        job.finish(job.start(), 2000)
    summary = read_run_folder(job.run_folder).summary
    assert summary.accuracy_after - summary.accuracy_before >= GAINS[experiment]
