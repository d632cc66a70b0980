"""Ranks over gloo that share the model of a training service by FSDP2, train adapters or all weights as one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import adapter_ranks
import full_weights_ranks
import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from adapter_ranks import config_of, joined, two_ranks
from adapter_rows import largest_difference
from full_weights_ranks import ALL, continued, follow_on_ranks
from safetensors.torch import load_file
from tiny_checkpoints import write_text_policy

from mobula.learner.adapters.ranks import FullWeightsRank
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ADAPTERS = {
    "packed": ("learner=fsdp2", "learner.packing=true"),
    "padded": ("learner=fsdp2", "learner.packing=false", "learner.activation_checkpointing=blocks"),
}
ALL_WEIGHTS = {
    "two": (2, ()),
    "four": (4, ("learner.packing=false",)),
    "two, gradients sharded": (2, ("learner.activation_checkpointing=blocks",)),
    "two replicas": (4, ("resources.learner.replicas=2", "learner.activation_checkpointing=blocks")),
}


def seen_by(folder: Path, num_ranks: int) -> list[dict[str, Any]]:
    return [torch.load(folder / f"seen-{rank}.pt", weights_only=False) for rank in range(num_ranks)]


def assert_equal_results(ranks: list[dict[str, Any]], one: dict[str, Any], atol: float) -> None:
    for n, alone in enumerate(one["parts"]):
        results = joined([rank["parts"][n] for rank in ranks])
        for result, expected in zip(results, joined([alone]), strict=True):
            if result is None or expected is None:
                assert result is expected
                continue
            assert result.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=atol)
            for own, of_one in zip(result.outputs, expected.outputs, strict=True):
                np.testing.assert_allclose(own["logprobs"], of_one["logprobs"], atol=1e-5, rtol=0)


def test_two_ranks_train_adapters_as_one_process(tmp_path: Path) -> None:
    base = write_text_policy(tmp_path / "model", "llama")
    for name in ("one", *ADAPTERS):
        (tmp_path / name).mkdir()
    adapter_ranks.follow(config_of(base), 0, 1, tmp_path / "one")
    words = "resources.learner.num_workers=2"
    configs = {name: config_of(base, words, *overrides) for name, overrides in ADAPTERS.items()}
    mp.start_processes(two_ranks, args=(configs, tmp_path), nprocs=2, start_method="forkserver")
    [one] = seen_by(tmp_path / "one", 1)
    for name in ADAPTERS:
        ranks = seen_by(tmp_path / name, 2)
        assert_equal_results(ranks, one, atol=0)
        for rank in ranks:
            for steps, of_one in zip(rank["steps"], one["steps"], strict=True):
                assert steps == [pytest.approx(metrics, rel=1e-4) for metrics in of_one]
            for adapter, factors in one["factors"].items():
                assert largest_difference(rank["factors"][adapter], factors) < 1e-5
                assert largest_difference(rank["factors"][adapter], ranks[0]["factors"][adapter]) == 0.0


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, and what one process made of it below `one`."""
    out = tmp_path_factory.mktemp("full")
    model = write_tiny_qwen2_5_vl(out / "model", seed=0)
    (out / "one").mkdir()
    full_weights_ranks.follow(config_of(model), 0, 1, out / "one")
    return out


@pytest.mark.parametrize(
    "name", ["two", "four", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in list(ALL_WEIGHTS)[2:])]
)
def test_ranks_train_all_weights_as_one_process(ran: Path, name: str) -> None:
    number, overrides = ALL_WEIGHTS[name]
    out = ran / name
    out.mkdir()
    words = ("learner=fsdp2", f"resources.learner.num_workers={number}", *overrides)
    config = config_of(ran / "model", *words)
    args = (config, number, out, ran / "one" / "state")
    mp.start_processes(follow_on_ranks, args=args, nprocs=number, start_method="forkserver")
    [one], ranks = seen_by(ran / "one", 1), seen_by(out, number)
    assert_equal_results(ranks, one, atol=1e-5)
    for rank in ranks:
        assert rank["steps"] == [pytest.approx(metrics, rel=1e-4) for metrics in one["steps"]]
        assert rank["continued"] == [pytest.approx(metrics, rel=1e-4) for metrics in one["steps"][1:]]
    exported, expected, initial = (
        load_file(folder / "model.safetensors") for folder in (out / "export", ran / "one" / "export", ran / "model")
    )
    assert largest_difference(exported, expected) < 1e-5
    assert largest_difference(initial, expected) > 1e-2, "the weights have moved"
    assert sum(rank["share"] for rank in ranks) == pytest.approx(config.resources.learner.replicas), "copies are shards"

    back = FullWeightsRank(config_of(ran / "model"), 0, 1)
    back.connect("")
    back.create("a", ALL)
    assert continued(back, out / "state") == [pytest.approx(metrics, rel=1e-4) for metrics in one["steps"][1:]]
