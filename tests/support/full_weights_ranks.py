"""What one rank does in the test of all weights on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_rows import ADAM, call_of, text_row
from backend_run import met_at
from learner_data import image, prompt
from transformers import AutoTokenizer

from mobula.cluster.errors import CheckpointError
from mobula.cluster.training_service.interfaces import AdapterSpec, LossCall, LossRow
from mobula.configs.schema import RunConfig
from mobula.learner.adapters.ranks import FullWeightsRank
from mobula.learner.backends import native

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


def follow(config: RunConfig, rank: int, world_size: int, out: Path, other_state: Path | None = None) -> None:
    """Trains, saves and loads in between, goes on from `other_state`, and writes what this rank saw."""
    weights = FullWeightsRank(config, rank, world_size)
    weights.connect(met_at(weights, rank, out / "address") if world_size > 1 else "")
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


def follow_on_ranks(rank: int, config: RunConfig, world_size: int, out: Path, other_state: Path) -> None:
    torch.set_num_threads(1)
    native.MIN_UNIT_NUMEL = 0  # every block is a unit
    if config.learner.activation_checkpointing == "blocks":
        native.MAX_WHOLE_GRADIENT_BYTES = 0  # gradients are sharded after every micro-batch
    follow(config, rank, world_size, out, other_state)
