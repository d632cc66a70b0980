"""Two FSDP2 ranks over gloo train exactly as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from backend_run import LORA, config_of, equal, train
from safetensors.torch import load_file

from learner.backends import fsdp2
from learner.policies.tiny import write_tiny_qwen2_5_vl


VARIANTS = {"untied": (), "tied": (), "adapters": LORA}
UNITS = {"untied": 0, "tied": 1 << 20, "adapters": 0}  # every block a unit, or the tiny model in one unit


def _rank(rank: int, models: dict[str, Path], out: Path) -> None:
    torch.set_num_threads(1)
    for name, model in models.items():
        fsdp2.MIN_UNIT_NUMEL = UNITS[name]
        config = config_of(model, "learner=fsdp2", "resources.learner.num_workers=2", *VARIANTS[name])
        train(config, rank, 2, out / f"two-{name}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What one process and two ranks made of an untied model, a tied one and one with adapters."""
    out = tmp_path_factory.mktemp("fsdp2")
    models = {n: write_tiny_qwen2_5_vl(out / n, seed=0, tie_word_embeddings=n == "tied") for n in VARIANTS}
    for name in VARIANTS:
        (out / f"two-{name}").mkdir()
        (out / f"one-{name}").mkdir()
        train(config_of(models[name], *VARIANTS[name]), 0, 1, out / f"one-{name}")
    mp.spawn(_rank, args=(models, out), nprocs=2)
    return out


@pytest.fixture(params=VARIANTS)
def ran(request, folder: Path) -> tuple[dict, dict]:
    return tuple(torch.load(folder / f"{n}-{request.param}" / "seen.pt") for n in ("one", "two"))


def test_two_ranks_end_with_the_weights_of_one_process(ran) -> None:
    one, two = ran
    assert equal(one["weights"], two["weights"], atol=2e-6)
    assert not equal(one["weights"], one["before"], atol=1e-4)
    torch.testing.assert_close(two["canary"], one["canary"], atol=1e-5, rtol=0)


def test_metrics_are_those_of_the_whole_batch_on_any_number_of_ranks(ran) -> None:
    one, two = ran
    for step in range(2):
        assert two["metrics"][step] == pytest.approx(one["metrics"][step], rel=1e-4, abs=1e-5)
    assert two["supervised"] == pytest.approx(one["supervised"], rel=1e-4)
    assert two["accuracy"] == one["accuracy"]


def test_a_resumed_group_goes_on_bit_for_bit(ran) -> None:
    for seen in ran:
        assert seen["version"] == 2
        assert equal(seen["reloaded"], seen["weights"], atol=0)
        assert torch.equal(seen["canary_reloaded"], seen["canary"])
        assert equal(seen["third_again"], seen["third"], atol=0)
        assert not equal(seen["third"], seen["weights"], atol=1e-5)


def test_a_group_goes_back_to_where_rl_began(ran) -> None:
    for seen in ran:
        assert equal(seen["start_again"], seen["start"], atol=0)
        assert seen["metrics_again"] == seen["metrics"], "the optimizer is as fresh as it was"


def test_a_gradient_that_is_not_finite_moves_nothing(ran) -> None:
    for seen in ran:
        assert seen["skipped"] == 1
        assert equal(seen["not_finite"], seen["third_again"], atol=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_export_holds_the_weights_under_the_names_of_the_checkpoint(folder: Path, name: str) -> None:
    names = load_file(folder / name / "model.safetensors").keys()
    for number in ("one", "two"):
        exported = load_file(folder / f"{number}-{name}" / "export" / "model.safetensors")
        assert exported.keys() == names
        assert equal(exported, torch.load(folder / f"{number}-{name}" / "seen.pt")["weights"], atol=0)
