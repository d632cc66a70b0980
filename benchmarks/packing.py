"""Rows without padding over padded rows, and over plain transformers: tokens/s of a forward and a backward pass.

One row is eight times as long as the mean. Every side has the same text-only model of random weights, in a process of
its own: packed and padded rows go through the policy in one micro-batch, `sorted` is padded in the micro-batches that
the learner cuts by length, and plain transformers computes each row by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.apart import Peer, apart
from benchmarks.harness.measure import Claim, Effort, Findings, Measurements, Side, interleave, rates
from benchmarks.harness.text_model import text_model
from mobula.cluster.records.media import MediaReader
from mobula.configs.load import load_config
from mobula.configs.overrides import overridden
from mobula.configs.schema import LearnerConfig
from mobula.learner.policies.batch import TokenSequence, collate
from mobula.learner.policies.head import PLAIN, token_logprobs
from mobula.learner.policies.packing import split_microbatches
from mobula.learner.policies.token import TokenPolicy

NUM_ROWS, LONGEST, MEAN = 16, 512, 64
VOCABULARY, WIDTH, NUM_BLOCKS = 2048, 256, 6
OVER_PADDED, OVER_PLAIN = 2.0, 0.85
TOLERANCE = 1e-4  # of a gradient that all sides compute, as a share of it
UNIT = "tokens/s"
SIDES = {
    "packed": "rows of {mean} tokens on average and {longest} at most, without padding, in one micro-batch",
    "padded": "the same rows, padded, in one micro-batch",
    "sorted": "the same rows, padded, in micro-batches of similar lengths",
    "plain": "the same rows one after another in plain transformers",
}


@dataclass(frozen=True)
class Go:
    """Do one forward and one backward pass over all rows."""


@dataclass(frozen=True)
class Done:
    """Measurements of one pass, and a number that all sides must agree on."""

    seconds: float  # of the CPU, which does not count those of other processes; on a GPU by the clock
    gradient: float  # sum of |gradient| over all parameters


class Passes:
    """One side, in a process of its own."""

    def __init__(self, side: str, device: str, config: LearnerConfig) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._side = side
        self._device = torch.device(device)
        self._config = config.model_copy(update={"packing": side == "packed"})
        self._model = text_model(WIDTH, NUM_BLOCKS, VOCABULARY).to(self._device)
        self._policy = None if side == "plain" else TokenPolicy(self._model, self._config)
        self._rows = [TokenSequence(ids, 1, (), ()) for ids in _rows()]
        self._clock = time.perf_counter if self._device.type == "cuda" else time.process_time

    def __call__(self, job: Go) -> Done:
        started = self._clock()
        for rows in self._microbatches():
            self._loss(rows).backward()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = self._clock() - started
        gradient = sum(p.grad.abs().sum().item() for p in self._model.parameters() if p.grad is not None)
        self._model.zero_grad()
        return Done(seconds, gradient)

    def _microbatches(self) -> list[list[TokenSequence]]:
        if self._side == "plain":
            return [[row] for row in self._rows]
        if self._side != "sorted":
            return [self._rows]
        [plan] = split_microbatches(self._rows, self._config, 1)
        return [[self._rows[i] for i in batch] for batch in plan]

    def _loss(self, rows: list[TokenSequence]) -> Tensor:
        if self._policy is not None:
            batch = collate(rows, MediaReader(timeout_s=1, max_items=1), self._device)
            return -self._policy(batch, PLAIN).logprobs.sum() / (NUM_ROWS * MEAN)
        ids = torch.from_numpy(rows[0].token_ids).long().to(self._device)[None]
        logits = self._model(input_ids=ids, use_cache=False).logits[:, :-1]
        return -token_logprobs(logits, ids[:, 1:], PLAIN).logprobs.sum() / (NUM_ROWS * MEAN)


def _rows() -> list[np.ndarray]:
    """One row of `LONGEST` tokens; the others have what is left of `NUM_ROWS * MEAN`, in two sizes."""
    rest, others = NUM_ROWS * MEAN - LONGEST, NUM_ROWS - 1
    lengths = [LONGEST, *(rest // others + (n < rest % others) for n in range(others))]
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCABULARY, size=n).astype(np.int32) for n in lengths]


def measure(effort: Effort, overrides: Sequence[str]) -> Findings:
    """All sides in turn."""
    config = load_config(overridden(["experiment=digits", f"learner.tokens_per_microbatch={LONGEST}"], overrides))
    env = {"OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        peers = {
            name: stack.enter_context(apart(Passes, name, config.resources.device, config.learner, env=env))
            for name in SIDES
        }
        gradients: dict[str, float] = {}
        found = asyncio.run(interleave({n: _side(n, peer, gradients) for n, peer in peers.items()}, effort))
    spread = max(gradients.values()) - min(gradients.values())
    assert spread <= TOLERANCE * gradients["plain"], f"the sides computed other gradients: {gradients}"
    series = {
        name: Measurements(what.format(mean=MEAN, longest=LONGEST), UNIT, found[name]) for name, what in SIDES.items()
    }
    claims = (
        Claim(f"packed / padded, max/mean length {LONGEST // MEAN}", _over(series, "padded"), OVER_PADDED),
        Claim("packed / padded, sorted by length", _over(series, "sorted")),
        Claim("packed / plain transformers, row by row", _over(series, "plain"), OVER_PLAIN),
    )
    settings = {"rows": NUM_ROWS, "width": WIDTH, "blocks": NUM_BLOCKS, "vocabulary": VOCABULARY, "threads": 1}
    return Findings(settings, series, claims)


def _over(series: dict[str, Measurements], other: str) -> float:
    return rates(series["packed"], series[other])


def _side(name: str, peer: Peer[Go, Done], gradients: dict[str, float]) -> Side:
    async def side(round_number: int) -> float:
        done = await asyncio.to_thread(peer.ask, Go())
        gradients[name] = done.gradient
        return NUM_ROWS * MEAN / done.seconds

    return side
