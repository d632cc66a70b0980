"""Two ranks under DeepSpeed ZeRO over gloo train as one process does, at either stage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from backend_run import LORA, config_of, equal, train
from safetensors.torch import load_file

from learner.policies.tiny import write_tiny_qwen2_5_vl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

VARIANTS = {
    "stage 2, tied": ("learner.zero_stage=2",),
    "stage 3, untied": ("learner.zero_stage=3",),
    "stage 3, adapters": ("learner.zero_stage=3", *LORA),
}


def _rank(rank: int, model: Path, overrides: tuple[str, ...], out: Path) -> None:
    torch.set_num_threads(1)
    train(config_of(model, "learner=deepspeed", "resources.learner.num_workers=2", *overrides), rank, 2, out)


@pytest.fixture(scope="module", params=VARIANTS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process and two ranks made of a model; `one`, `two` and `model` lie in it."""
    out = tmp_path_factory.mktemp("deepspeed")
    model = write_tiny_qwen2_5_vl(out / "model", seed=0, tie_word_embeddings="untied" not in request.param)
    for name in ("one", "two"):
        (out / name).mkdir()
    train(config_of(model, *VARIANTS[request.param]), 0, 1, out / "one")
    mp.spawn(_rank, args=(model, VARIANTS[request.param], out / "two"), nprocs=2)
    return out


@pytest.fixture
def ran(folder: Path) -> tuple[dict, dict]:
    return tuple(torch.load(folder / name / "seen.pt") for name in ("one", "two"))


def test_two_ranks_end_with_the_weights_of_one_process(ran) -> None:
    one, two = ran
    assert equal(one["weights"], two["weights"], atol=2e-6)
    assert not equal(one["weights"], one["before"], atol=1e-4)
    torch.testing.assert_close(two["canary"], one["canary"], atol=1e-5, rtol=0)


def test_metrics_are_those_of_the_whole_batch(ran) -> None:
    one, two = ran
    for step in range(2):
        assert two["metrics"][step] == pytest.approx(one["metrics"][step], rel=1e-4, abs=1e-5)
    assert two["supervised"] == pytest.approx(one["supervised"], rel=1e-4)
    assert two["accuracy"] == one["accuracy"]


def test_a_resumed_group_goes_on_bit_for_bit(ran) -> None:
    _, seen = ran
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


def test_the_export_holds_the_weights_under_the_names_of_the_checkpoint(folder: Path) -> None:
    exported = load_file(folder / "two" / "export" / "model.safetensors")
    assert exported.keys() == load_file(folder / "model" / "model.safetensors").keys()
    assert equal(exported, torch.load(folder / "two" / "seen.pt")["weights"], atol=0)


def test_a_checkpoint_says_for_which_ranks_it_is(folder: Path) -> None:
    assert json.loads((folder / "two" / "state" / "deepspeed.json").read_text())["num_ranks"] == 2
