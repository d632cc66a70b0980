"""Two ranks train exactly as one process does: FSDP2, and DeepSpeed ZeRO at either stage, all over gloo."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from backend_run import LORA, config_of, connected, equal, factors, steps, train, without_sharing
from one_learner import saved
from safetensors.torch import load_file
from transformers import AutoTokenizer

from mobula.cluster.errors import CheckpointError
from mobula.configs.schema import RunConfig
from mobula.learner.backends import native
from mobula.learner.backends.deepspeed import ENVIRONMENT
from mobula.learner.learner import Learner
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl
from mobula.learner.policy_weights import export_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

AVERAGE, BLOCKS = "learner.ema_decay=0.5", "learner.activation_checkpointing=blocks"
PACKED, PADDED = "learner.packing=true", "learner.packing=false"
MODELS = {"untied": (), "tied": (), "adapters": LORA}  # name -> overrides that go with it


@dataclass(frozen=True)
class Variant:
    """One way to train one of the models on two ranks."""

    model: str
    overrides: tuple[str, ...]
    min_unit_numel: int = 0  # of FSDP2: every block a unit, or the tiny model in one unit
    max_whole_gradient_bytes: int = 0  # of FSDP2: gradients are exchanged after every micro-batch, or once a step


VARIANTS = {
    "fsdp2": {
        "untied": Variant("untied", ("learner=fsdp2", AVERAGE, PACKED, BLOCKS)),
        "tied": Variant(
            "tied", ("learner=fsdp2", AVERAGE, PACKED), min_unit_numel=1 << 20, max_whole_gradient_bytes=1 << 30
        ),
        "adapters": Variant("adapters", ("learner=fsdp2", AVERAGE, PACKED)),
    },
    "deepspeed": {
        "stage 2, tied": Variant("tied", ("learner=deepspeed", "learner.zero_stage=2", AVERAGE, PACKED)),
        "stage 3, untied": Variant("untied", ("learner=deepspeed", "learner.zero_stage=3", AVERAGE, PACKED, BLOCKS)),
        "stage 3, adapters": Variant("adapters", ("learner=deepspeed", "learner.zero_stage=3", AVERAGE, PACKED)),
    },
}


def _rank(rank: int, variants: dict[str, Variant], models: Path, out: Path) -> None:
    torch.set_num_threads(1)
    for name, variant in variants.items():
        native.MIN_UNIT_NUMEL = variant.min_unit_numel
        native.MAX_WHOLE_GRADIENT_BYTES = variant.max_whole_gradient_bytes
        chunked = "learner.logprob_chunk_tokens=3"  # one process computes the logits of a micro-batch at once
        words = ("resources.learner.num_workers=2", chunked, *variant.overrides, *MODELS[variant.model])
        train(config_of(models / variant.model, *words), rank, 2, out / name)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models, and below `one-<model>` what one process made of each."""
    out = tmp_path_factory.mktemp("one_process")
    for name, overrides in MODELS.items():
        model = write_tiny_qwen2_5_vl(out / name, seed=0, tie_word_embeddings=name == "tied")
        (out / f"one-{name}").mkdir()
        train(config_of(model, *overrides, AVERAGE, PADDED), 0, 1, out / f"one-{name}")
    return out


@pytest.fixture(scope="module", params=VARIANTS)
def two_ranks(request: pytest.FixtureRequest, one_process: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Below each variant's name, what two ranks of this backend made of its model."""
    multiprocessing.set_forkserver_preload(["backend_run", "deepspeed"])  # imported once, not by every rank
    out = tmp_path_factory.mktemp(request.param)
    variants = VARIANTS[request.param]
    for name in variants:
        (out / name).mkdir()
    # DeepSpeed keeps its settings for the life of a process: a variant there has processes of its own.
    together = [{name: variant} for name, variant in variants.items()] if request.param == "deepspeed" else [variants]
    for some in together:
        mp.start_processes(_rank, args=(some, one_process, out), nprocs=2, start_method="forkserver")
    (out / "backend").write_text(request.param)
    return out


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What DeepSpeed is imported with when it reads a state in this process goes with the test."""
    for key, value in {**ENVIRONMENT, "DS_ACCELERATOR": "cpu"}.items():
        monkeypatch.setenv(key, value)


@dataclass(frozen=True)
class Ran:
    """One variant: its folders, and what was seen on the way, by one process and by two ranks."""

    variant: Variant
    base: Path
    folders: tuple[Path, Path]
    one: dict
    two: dict


@pytest.fixture(params=range(3))
def ran(request: pytest.FixtureRequest, one_process: Path, two_ranks: Path) -> Ran:
    name, variant = list(VARIANTS[(two_ranks / "backend").read_text()].items())[request.param]
    folders = (one_process / f"one-{variant.model}", two_ranks / name)
    return Ran(variant, one_process / variant.model, folders, *(torch.load(folder / "seen.pt") for folder in folders))


def configs_of(ran: Ran, *words: str) -> tuple[RunConfig, RunConfig]:
    """Of one process, and of two ranks."""
    adapters = MODELS[ran.variant.model]
    ranks = (*ran.variant.overrides, "resources.learner.num_workers=2")
    return config_of(ran.base, PADDED, *adapters, *words), config_of(ran.base, *ranks, *adapters, *words)


def test_two_ranks_end_with_the_weights_of_one_process(ran: Ran) -> None:
    assert equal(ran.one["weights"], ran.two["weights"], atol=2e-6)
    assert not equal(ran.one["weights"], ran.one["before"], atol=1e-4)
    torch.testing.assert_close(ran.two["canary"], ran.one["canary"], atol=1e-5, rtol=0)


def test_metrics_are_those_of_the_whole_batch_on_any_number_of_ranks(ran: Ran) -> None:
    for one, two in zip(ran.one["metrics"], ran.two["metrics"], strict=True):
        assert without_sharing(two) == pytest.approx(one, rel=1e-4, abs=1e-5), "one pads its rows"
        assert two["logprob_gap_mean"] > 0, "of its own tokens, then of fresh ones"
    assert ran.two["supervised"] == pytest.approx(ran.one["supervised"], rel=1e-4)
    assert ran.two["accuracy"] == ran.one["accuracy"]


def test_a_resumed_group_goes_on_bit_for_bit(ran: Ran) -> None:
    for seen in (ran.one, ran.two):
        assert seen["version"] == 2
        assert equal(seen["reloaded"], seen["weights"], atol=0)
        assert torch.equal(seen["canary_reloaded"], seen["canary"])
        assert equal(seen["third_again"], seen["third"], atol=0)
        assert not equal(seen["third"], seen["weights"], atol=1e-5)


def test_a_group_goes_back_to_where_rl_began(ran: Ran) -> None:
    for seen in (ran.one, ran.two):
        assert equal(seen["start_again"], seen["start"], atol=0)
        assert seen["metrics_again"] == seen["metrics"], "the optimizer is as fresh as it was"


def test_the_average_of_the_weights_is_that_of_one_process(ran: Ran, tmp_path: Path) -> None:
    for n, (config, folder) in enumerate(zip(configs_of(ran, AVERAGE), ran.folders, strict=True)):
        export_state(config, folder / "state", tmp_path / str(n), merge=True, average=True)
    one, two = (load_file(tmp_path / str(n) / "model.safetensors") for n in range(2))
    assert equal(one, two, atol=2e-6)
    assert not equal(two, load_file(ran.folders[1] / "export" / "model.safetensors"), atol=1e-4)


def test_one_process_exports_the_state_of_any_number_of_ranks(ran: Ran, tmp_path: Path) -> None:
    """At the same weights the ranks wrote `export` themselves."""
    for n, (config, folder, seen) in enumerate(zip(configs_of(ran), ran.folders, (ran.one, ran.two), strict=True)):
        export_state(config, folder / "state", tmp_path / str(n), merge=True, average=False)
        found, expected = (load_file(at / "model.safetensors") for at in (tmp_path / str(n), folder / "export"))
        assert equal(found, expected, atol=0)
        if config.policy.lora.is_on:
            export_state(config, folder / "state", tmp_path / f"{n}-adapter", merge=False, average=False)
            found = load_file(tmp_path / f"{n}-adapter" / "adapter_model.safetensors")
            assert found and equal(found, seen["factors"], atol=0)


def test_a_state_of_another_backend_is_refused(ran: Ran, tmp_path: Path) -> None:
    is_deepspeed = "learner=deepspeed" in ran.variant.overrides
    words = () if is_deepspeed else ("learner=deepspeed", "resources.learner.num_workers=2")
    config = config_of(ran.base, *words, *MODELS[ran.variant.model])
    with pytest.raises(CheckpointError, match=r"holds no complete (learner|DeepSpeed) state: use an older"):
        export_state(config, ran.folders[1] / "state", tmp_path / "out", merge=True, average=False)


def test_a_gradient_that_is_not_finite_moves_nothing(ran: Ran) -> None:
    for seen in (ran.one, ran.two):
        assert seen["skipped"] == 1
        assert equal(seen["not_finite"], seen["third_again"], atol=0)


def test_the_export_holds_the_weights_under_the_names_of_the_checkpoint(ran: Ran) -> None:
    names = load_file(ran.base / "model.safetensors").keys()
    for folder, seen in zip(ran.folders, (ran.one, ran.two), strict=True):
        exported = load_file(folder / "export" / "model.safetensors")
        assert exported.keys() == names
        assert equal(exported, seen["weights"], atol=0)


@pytest.mark.parametrize("two_ranks", ["deepspeed"], indirect=True)
def test_a_checkpoint_holds_its_number_of_ranks(two_ranks: Path) -> None:
    for name in VARIANTS["deepspeed"]:
        assert json.loads((two_ranks / name / "state" / "deepspeed.json").read_text())["num_ranks"] == 2


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


def _exporting_rank(rank: int, case: Case, model: Path, out: Path) -> None:
    torch.set_num_threads(1)
    learner = connected(Learner(case.config(model), rank, 2, (250,)), rank, 2, out / "address")
    first, second = steps(AutoTokenizer.from_pretrained(model))
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
    saved(learner, out / "state")
    learner.export(out / "expected")
    found = factors(learner)
    if rank == 0:
        torch.save(found, out / "factors.pt")


@pytest.mark.matrix
@pytest.mark.parametrize("name", CASES)
def test_an_export_equals_what_the_ranks_gathered(name: str, tmp_path: Path) -> None:
    """Bit for bit: frozen parts, adapters, optimizer state in host memory."""
    case = CASES[name]
    model = write_tiny_qwen2_5_vl(tmp_path / "model", seed=0)
    multiprocessing.set_forkserver_preload(["backend_run", "deepspeed"])
    mp.start_processes(_exporting_rank, args=(case, model, tmp_path), nprocs=2, start_method="forkserver")
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
