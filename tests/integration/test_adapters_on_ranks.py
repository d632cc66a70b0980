"""Ranks over gloo that share the model of a training service by FSDP2, train adapters or all weights as one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from adapter_rows import ADAM, OTHER, SPEC, call_of, factors_of, rows_of, text_row
from backend_run import connected
from learner_data import image, prompt, tiny_config
from one_learner import largest_difference
from safetensors.torch import load_file
from tiny_checkpoints import write_text_policy
from transformers import AutoTokenizer

from mobula.cluster.errors import CheckpointError
from mobula.cluster.training_service.interfaces import AdapterSpec, LossCall, LossResult, LossRow
from mobula.configs.schema import RunConfig
from mobula.learner.adapters.adapter import PartialResult
from mobula.learner.adapters.ranks import AdapterRank, FullWeightsRank
from mobula.learner.backends import native
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


def config_of(model: Path, *overrides: str) -> RunConfig:
    return tiny_config(model, "learner.tokens_per_microbatch=60", *overrides)


def follow_adapters(config: RunConfig, rank: int, world_size: int, out: Path) -> None:
    """Trains two adapters, saves and loads in between, and writes what this rank saw."""
    adapters = connected(AdapterRank(config, rank, world_size), rank, world_size, out / "address")
    adapters.create("a", SPEC)
    adapters.create("b", OTHER)
    seen: dict = {"parts": [], "steps": []}
    bad = LossCall("b", [], "cross_entropy")
    for n in range(3):
        short = LossCall("b", rows_of(50 + n, num=1), "cross_entropy")  # fewer rows than ranks
        calls = [call_of("a", n), short, bad, call_of("a", 20 + n, has_backward=False)]
        seen["parts"].append(adapters.compute(calls))
        if n == 1:  # with gradients that no step has applied
            adapters.save("a", out / "state")
            adapters.load("a", out / "state", with_optimizer=True)
        seen["steps"].append([adapters.step(name, ADAM) for name in ("a", "b")])
    seen["parts"].append(adapters.compute([short]))
    seen["factors"] = {name: factors_of(adapters, name) for name in ("a", "b")}
    torch.save(seen, out / f"seen-{rank}.pt")
    adapters.close()


def adapters_on_two_ranks(rank: int, configs: dict[str, RunConfig], out: Path) -> None:
    torch.set_num_threads(1)
    native.MIN_UNIT_NUMEL = 0  # every block is a unit
    for name, config in configs.items():
        follow_adapters(config, rank, 2, out / name)


def joined(parts: list[list[PartialResult | Exception]]) -> list[LossResult | None]:
    """The results of all calls from the parts of all ranks; None for a failed call."""
    results: list[LossResult | None] = []
    for of_ranks in zip(*parts, strict=True):
        failed = [isinstance(part, Exception) for part in of_ranks]
        assert all(failed) or not any(failed), "ranks agree on the calls that failed"
        results.append(None if failed[0] else PartialResult.joined(of_ranks))
    return results


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
    follow_adapters(config_of(base), 0, 1, tmp_path / "one")
    words = "resources.learner.num_workers=2"
    configs = {name: config_of(base, words, *overrides) for name, overrides in ADAPTERS.items()}
    mp.start_processes(adapters_on_two_ranks, args=(configs, tmp_path), nprocs=2, start_method="forkserver")
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


ALL = AdapterSpec(rank=0, alpha=32.0, seed=0)
NUM_STEPS = 3


def image_row(model: Path, seed: int) -> LossRow:
    asked = prompt(AutoTokenizer.from_pretrained(model), f"i{seed}", [image(seed), image(seed + 1, 2, 4)])
    targets = np.append(asked.expanded_ids[1:], 7).astype(np.int64)
    return LossRow(asked, {"target_tokens": targets, "weights": np.ones(len(targets), np.float32)})


def policy_row(seed: int) -> LossRow:
    rng = np.random.default_rng(seed)
    ids, advantages = rng.integers(0, 250, size=9), rng.normal(size=8).astype(np.float32)
    return text_row(ids, logprobs=np.full(8, -5.0, np.float32), advantages=advantages)


def calls_of(model: Path, step: int) -> list[LossCall]:
    """Rows of text and images, a single row (fewer than ranks), a call that is refused, and a forward pass."""
    return [
        LossCall("a", [*call_of("a", step).rows, image_row(model, step)], "cross_entropy"),
        LossCall("a", [policy_row(step)], "ppo"),
        LossCall("a", [], "cross_entropy"),
        call_of("a", 20 + step, has_backward=False),
    ]


def follow_all(config: RunConfig, rank: int, world_size: int, out: Path, other_state: Path | None = None) -> None:
    """Trains, saves and loads in between, goes on from `other_state`, and writes what this rank saw."""
    weights = connected(FullWeightsRank(config, rank, world_size), rank, world_size, out / "address")
    weights.create("a", ALL)
    model = Path(config.policy.model)
    seen: dict[str, Any] = {"parts": [], "steps": []}
    for step in range(NUM_STEPS):
        seen["parts"].append(weights.compute(calls_of(model, step)))
        if step == 1:  # with a gradient that no step has applied
            weights.save("a", out / "state")
            weights.load("a", out / "state", with_optimizer=True)
        seen["steps"].append(dict(weights.step("a", ADAM)))
    if world_size > 1:  # a folder that one rank alone cannot read is refused by all, and changes nothing
        with pytest.raises(CheckpointError):
            weights.load("a", out / ("state" if rank == 0 else "nowhere"), with_optimizer=True)
    weights.export("a", out / "export")
    if other_state is not None:
        seen["continued"] = continued(weights, other_state)
    held = [tensor.numel() for tensor in weights._initial]
    seen["share"] = sum(held) / sum(p.numel() for p in weights._trained.values())
    torch.save(seen, out / f"seen-{rank}.pt")
    weights.close()


def continued(weights: FullWeightsRank, state: Path) -> list[dict[str, float]]:
    """The metrics of the steps after a saved state."""
    model = Path(weights._config.policy.model)
    weights.load("a", state, with_optimizer=True)
    steps = [dict(weights.step("a", ADAM))]
    weights.compute(calls_of(model, 2))
    return [*steps, dict(weights.step("a", ADAM))]


def all_on_ranks(rank: int, config: RunConfig, world_size: int, out: Path, other_state: Path) -> None:
    torch.set_num_threads(1)
    native.MIN_UNIT_NUMEL = 0  # every block is a unit
    if config.learner.activation_checkpointing == "blocks":
        native.MAX_WHOLE_GRADIENT_BYTES = 0  # gradients are sharded after every micro-batch
    follow_all(config, rank, world_size, out, other_state)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, and what one process made of it below `one`."""
    out = tmp_path_factory.mktemp("full")
    model = write_tiny_qwen2_5_vl(out / "model", seed=0)
    (out / "one").mkdir()
    follow_all(config_of(model), 0, 1, out / "one")
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
    mp.start_processes(all_on_ranks, args=args, nprocs=number, start_method="forkserver")
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
