"""Two adapters on one frozen base in one batch, over one after the other: tokens/s of forward and backward passes.

A batch reads the weights once and has the overhead of each layer once, so it gains where a pass is bound by these. A
core computes SmolLM2-135M at its peak rate from about 100 tokens on, where nothing is left to gain. The target is that
of one short row of the tiny model.

Both sides compute the same rows of cross-entropy with the same rank, in one process and one thread: a call of each
adapter together, or a call of one and then of the other. Optimizer steps are the same on both sides and are left out.
Models: the decoder of the tiny model of random weights, and SmolLM2-135M from the extra `pretrained`.

On a GPU: `python -m benchmarks adapter_batches resources=gpu_1`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from benchmarks.harness.apart import Peer, apart
from benchmarks.harness.measure import QUICK, Claim, Effort, Findings, Measurements, Side, interleave, share
from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.training_service.interfaces import AdapterSpec, LossCall, LossRow
from mobula.configs.load import load_config
from mobula.configs.overrides import overridden
from mobula.configs.schema import RunConfig
from mobula.learner.adapters.ranks import AdapterRank
from mobula.learner.policies.pretrained import PRETRAINED
from mobula.learner.policies.tiny import write_tiny

MODELS, SIDES = ("tiny", "smollm2-135m"), ("together", "in turns")
TINY = "qwen2.5-vl"  # its decoder alone computes rows of text
NUM_ROWS, NUM_TOKENS = (1, 2, 4), (8, 32)  # rows of each adapter, tokens of a row
STRICT = (1, 8)
TARGET = 1.5
MAX_REPEATS = 3
RANK, VOCABULARY = 8, 256
MAX_DIFFERENCE = 1e-4  # of the losses of both sides, as a share
UNIT = "tokens/s"


@dataclass(frozen=True)
class Work:
    """Compute the gradients of two adapters."""

    side: str
    num_rows: int
    num_tokens: int


class Passes:
    """A base model with two adapters, in a separate process."""

    def __init__(self, config: RunConfig) -> None:
        self._is_cuda = config.resources.device == "cuda"
        self._rank = AdapterRank(config, 0, 1)
        self._rank.connect("")
        torch.set_num_threads(1)
        self._clock = time.perf_counter if self._is_cuda else time.process_time
        for seed, name in enumerate("ab"):
            self._rank.create(name, AdapterSpec(rank=RANK, alpha=16.0, seed=seed))

    def __call__(self, work: Work) -> tuple[float, float]:
        """Returns seconds and the sum of the losses. Seconds are of the CPU, which does not count those of other
        processes; on a GPU by the clock."""
        calls = [LossCall(name, _rows(seed, work), "cross_entropy") for seed, name in enumerate("ab")]
        started = self._clock()
        batches = [calls] if work.side == "together" else [[call] for call in calls]
        results = [result for batch in batches for result in self._rank.compute(batch)]
        if self._is_cuda:
            torch.cuda.synchronize()
        seconds = self._clock() - started
        losses = 0.0
        for result in results:
            if isinstance(result, Exception):
                raise result
            losses += result.loss_sum
        return seconds, losses


def _rows(seed: int, work: Work) -> list[LossRow]:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(work.num_rows):
        ids = rng.integers(16, VOCABULARY, work.num_tokens + 1)
        tokens = ids[:-1].astype(np.int32)
        weights = np.ones(work.num_tokens, dtype=np.float32)
        rows.append(LossRow(Prompt("p", "p", "", tokens, tokens), {"target_tokens": ids[1:], "weights": weights}))
    return rows


def measure(effort: Effort, overrides: Sequence[str]) -> Findings:
    """Both sides in turn, for every model and size."""
    models = MODELS[:1] if effort == QUICK else MODELS
    sizes = [STRICT] if effort == QUICK else list(product(NUM_ROWS, NUM_TOKENS))
    effort = replace(effort, repeats=min(effort.repeats, MAX_REPEATS), warmups=1)
    series: dict[str, Measurements] = {}
    claims: list[Claim] = []
    with TemporaryDirectory(prefix="mobula-adapters-") as folder:
        for model in models:
            source = _written(model, Path(folder) / model)
            words = ["experiment=digits", f"policy.model={source}", "learner=single"]
            words += ["resources.learner.num_workers=1", f"learner.tokens_per_microbatch={10**6}"]
            config = load_config(overridden(words, overrides))
            with ExitStack() as stack:
                peer = stack.enter_context(apart(Passes, config, env={"OMP_NUM_THREADS": "1"}))
                for num_rows, num_tokens in sizes:
                    losses: dict[str, float] = {}
                    sides = {name: _side(peer, Work(name, num_rows, num_tokens), losses) for name in SIDES}
                    rates = asyncio.run(interleave(sides, effort))
                    together, in_turns = (losses[name] for name in SIDES)
                    assert abs(together - in_turns) <= MAX_DIFFERENCE * abs(in_turns), f"{together} and {in_turns}"
                    what = f"{model}, {num_rows} x {num_tokens} tokens of each adapter"
                    series |= {f"{what}, {name}": Measurements(name, UNIT, values) for name, values in rates.items()}
                    target = TARGET if model == MODELS[0] and (num_rows, num_tokens) == STRICT else None
                    claims.append(Claim(f"{what}: speed", share(*(rates[name] for name in SIDES)), target))
    return Findings({"rank": RANK, "threads": 1}, series, tuple(claims))


def _written(model: str, folder: Path) -> Path:
    return write_tiny(TINY, folder) if model == "tiny" else PRETRAINED[model].write(folder)


def _side(peer: Peer[Work, tuple[float, float]], work: Work, losses: dict[str, float]) -> Side:
    async def side(round_number: int) -> float:
        seconds, losses[work.side] = await asyncio.to_thread(peer.ask, work)
        return 2 * work.num_rows * work.num_tokens / seconds

    return side
