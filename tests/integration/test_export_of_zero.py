"""One process exports what two ranks of DeepSpeed saved, bit for bit: both stages, weights and their average, frozen
parts, adapters, optimizer state in host memory."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from backend_run import LORA, config_of, equal, factors, met_at, steps
from safetensors.torch import load_file
from transformers import AutoTokenizer

from mobula.configs.schema import RunConfig
from mobula.learner.backends.deepspeed import ENVIRONMENT
from mobula.learner.learner import Learner
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl
from mobula.learner.policy_weights import export_state

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.timeout(600)]

FROZEN = ("policy.freeze=[visual.]",)


@dataclass(frozen=True)
class Case:
    """How two ranks hold and train the model."""

    stage: int
    overrides: tuple[str, ...] = ()
    offload: str = "none"

    def config(self, model: Path) -> RunConfig:
        ranks = ("learner=deepspeed", f"learner.zero_stage={self.stage}", "resources.learner.num_workers=2")
        config = config_of(model, *ranks, "learner.ema_decay=0.5", *self.overrides)
        learner = config.learner.model_copy(update={"offload": self.offload})  # a configuration refuses it on CPUs
        return config.model_copy(update={"learner": learner})


CASES = {
    "stage 2, adapters": Case(2, LORA),
    "stage 2, frozen": Case(2, FROZEN),
    "stage 3, frozen": Case(3, FROZEN),
    "stage 2, offloaded": Case(2, offload="optimizer"),
    "stage 3, offloaded": Case(3, LORA, offload="optimizer"),
    "stage 3, offloaded parameters": Case(3, offload="parameters"),
}


def _rank(rank: int, case: Case, model: Path, out: Path) -> None:
    torch.set_num_threads(1)
    config = case.config(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    learner = Learner(config, rank, 2, (250,))
    learner.connect(met_at(learner, rank, out / "address"))
    first, second = steps(tokenizer)
    _write(learner, rank, out / "0")
    learner.update(first, 1)
    _write(learner, rank, out / "1")
    learner.update(second, 2)
    _write(learner, rank, out / "2")
    learner.load(out / "1" / "state")
    _write(learner, rank, out / "1-resumed")
    learner.update(second, 2)
    _write(learner, rank, out / "2-resumed")
    learner.close()


def _write(learner: Learner, rank: int, out: Path) -> None:
    """The state, and what the ranks gather of their weights at that moment."""
    learner.save(out / "state")
    learner.finish_save()
    learner.export(out / "expected")
    found = factors(learner)
    if rank == 0:
        torch.save(found, out / "factors.pt")


@pytest.mark.parametrize("name", CASES)
def test_an_export_equals_what_the_ranks_gathered(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {**ENVIRONMENT, "DS_ACCELERATOR": "cpu"}.items():
        monkeypatch.setenv(key, value)
    case = CASES[name]
    model = write_tiny_qwen2_5_vl(tmp_path / "model", seed=0)
    multiprocessing.set_forkserver_preload(["backend_run", "deepspeed"])
    mp.start_processes(_rank, args=(case, model, tmp_path), nprocs=2, start_method="forkserver")
    config = case.config(model)
    weights, averages = {}, {}
    for at in ("0", "1", "2", "1-resumed", "2-resumed"):
        folder = tmp_path / at
        weights[at] = exported(config, folder, "weights", merge=True)
        averages[at] = exported(config, folder, "average", merge=True, average=True)
        assert equal(weights[at], load_file(folder / "expected" / "model.safetensors"), atol=0)
        if config.policy.lora.is_on:
            found = exported(config, folder, "adapter", merge=False)
            assert found and equal(found, torch.load(folder / "factors.pt"), atol=0)
    for found in (weights, averages):
        assert equal(found["1"], found["1-resumed"], atol=0) and equal(found["2"], found["2-resumed"], atol=0)
        moved = {name for name, tensor in found["1"].items() if not torch.equal(tensor, found["0"][name])}
        assert moved and (case.overrides != FROZEN or not any("visual" in name for name in moved))
    if not config.policy.lora.is_on:  # of adapters it is the average of factors
        mean = {name: (found + averages["1"][name]) / 2 for name, found in weights["2"].items()}
        assert equal(averages["2"], mean, atol=1e-6) and equal(averages["0"], weights["0"], atol=0)
        assert not equal(averages["2"], weights["2"], atol=1e-4)


def exported(
    config: RunConfig, folder: Path, name: str, *, merge: bool, average: bool = False
) -> dict[str, torch.Tensor]:
    export_state(config, folder / "state", folder / name, merge=merge, average=average)
    [file] = (folder / name).glob("*.safetensors")
    return load_file(file)
