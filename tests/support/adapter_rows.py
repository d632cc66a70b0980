"""Ranks, adapters and rows that the tests of adapters on one base share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from learner_data import tiny_config

from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.training_service.interfaces import (
    AdamParameters,
    AdapterSpec,
    LossCall,
    LossResult,
    LossRow,
)
from mobula.learner.adapters.calls import PartialResult
from mobula.learner.adapters.rank import AdapterRank

# A large eps: at 1e-12 Adam turns the rounding of a gradient near 0 into a step as large as the learning rate.
ADAM = AdamParameters(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-4, weight_decay=0.01, grad_clip_norm=1.0)
SPEC = AdapterSpec(rank=4, alpha=8.0, seed=3)
OTHER = AdapterSpec(rank=2, alpha=16.0, seed=5, trains_mlp=False)


def connected(model: Path, *overrides: str, tokens: int = 60) -> AdapterRank:
    """The only rank; `tokens` of a micro-batch are less than those of a call."""
    rank = AdapterRank(tiny_config(model, f"learner.tokens_per_microbatch={tokens}", *overrides), 0, 1)
    rank.connect("")
    return rank


def text_row(ids: np.ndarray, **inputs: np.ndarray) -> LossRow:
    """A row of text whose targets are its tokens shifted by one, unless given."""
    tokens = ids[:-1].astype(np.int32)
    prompt = Prompt("p", "p", "", tokens, tokens)
    return LossRow(prompt, {"target_tokens": ids[1:].astype(np.int64), **inputs})


def weighted(ids: np.ndarray) -> LossRow:
    """A row of cross-entropy with weights of 0 and 1."""
    return text_row(ids, weights=(np.arange(len(ids) - 1) % 3 > 0).astype(np.float32))


def rows_of(seed: int, num: int = 3, longest: int = 20) -> list[LossRow]:
    rng = np.random.default_rng(seed)
    return [weighted(rng.integers(0, 250, size=rng.integers(3, longest + 1))) for _ in range(num)]


def call_of(adapter: str, seed: int, **changed: object) -> LossCall:
    return LossCall(adapter, rows_of(seed), "cross_entropy", **changed)  # type: ignore[arg-type]


def whole(part: PartialResult | Exception) -> LossResult:
    """The result of a rank that computes all rows."""
    assert isinstance(part, PartialResult), part
    return PartialResult.joined([part])


def factors_of(rank: AdapterRank, adapter: str) -> dict[str, torch.Tensor]:
    pairs = rank._adapters[adapter].factors.items()
    return {f"{name}.{n}": t.detach().clone() for name, pair in pairs for n, t in enumerate(pair)}


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)
