"""What learner ranks hold and compute of rows: memory of a long row that two ranks share, and balance of four ranks.

Memory: a forward and a backward pass of one row by one process, and by two with `learner.sequence_parallel=2`. Balance:
CPU time of each of four ranks for its part of rows of which the longest is eight times the mean, measured in turn.
All have one text-only model of random weights.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.harness.apart import Peer, apart
from benchmarks.harness.measure import Claim, Effort, Findings, Measurements, Side, interleave
from benchmarks.harness.peak_memory import peak_bytes, restart_peak
from benchmarks.harness.text_model import text_model
from mobula.cluster.records.media import MediaReader
from mobula.configs.load import load_config
from mobula.configs.schema import LearnerConfig
from mobula.learner.policies.attention.sequence_ranks import SequenceRanks
from mobula.learner.policies.batch import TokenSequence, collate
from mobula.learner.policies.head import PLAIN
from mobula.learner.policies.packing import split_microbatches
from mobula.learner.policies.token import TokenPolicy

ROW_TOKENS = 4096
NUM_RANKS, NUM_ROWS, MEAN, SKEW = 4, 64, 96, 8
VOCABULARY, WIDTH, NUM_BLOCKS = 2048, 256, 6
MAX_MEMORY, MAX_LOAD = 0.6, 1.1
TOLERANCE = 1e-4  # of a gradient that both sides compute, as a share of it
CPU = torch.device("cpu")
UNIT = "passes/s"


@dataclass(frozen=True)
class Pass:
    """Do one forward and one backward pass over rows of these lengths, a micro-batch at a time."""

    microbatches: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Done:
    seconds: float  # of the CPU, which does not count those of other processes
    peak_bytes: int  # beyond the parameters
    gradient: float  # sum of the gradients of one parameter, of this rank


class Passes:
    """One rank, in a process of its own."""

    def __init__(self, rank: int, num_ranks: int, store: Path) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        ranks = None
        if num_ranks > 1:
            dist.init_process_group(
                "gloo", store=dist.FileStore(str(store), num_ranks), rank=rank, world_size=num_ranks
            )
            ranks = SequenceRanks(num_ranks, CPU)
        self._policy = TokenPolicy(text_model(WIDTH, NUM_BLOCKS, VOCABULARY), _config(), ranks)

    def __call__(self, job: Pass) -> Done:
        rng = np.random.default_rng(0)
        before = restart_peak()
        started = time.process_time()
        for lengths in job.microbatches:
            rows = [TokenSequence(rng.integers(0, VOCABULARY, n).astype(np.int32), 1, (), ()) for n in lengths]
            batch = collate(rows, MediaReader(timeout_s=1, max_items=1), CPU)
            (self._policy(batch, PLAIN).logprobs * batch.target_mask).mean().backward()
        seconds, peak = time.process_time() - started, peak_bytes() - before
        gradient = self._policy.get_submodule("model.model.norm").weight.grad.sum().item()
        self._policy.zero_grad()
        return Done(seconds, peak, gradient)


def _config() -> LearnerConfig:
    budget = f"learner.tokens_per_microbatch={MEAN * SKEW}"
    attention = f"learner.attention_token_cost={1 / (12 * WIDTH)}"
    return load_config(["experiment=digits", "learner.packing=true", budget, attention]).learner


def measure(effort: Effort, overrides: Sequence[str]) -> Findings:
    """One process and two in turn on the long row; then each rank's part of the skewed rows in turn."""
    # Memory that is freed goes back to the system at once, so that a pass has none of an earlier one.
    env = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    with tempfile.TemporaryDirectory(prefix="mobula-") as folder, ExitStack() as stack:
        one, *two = (
            stack.enter_context(apart(Passes, rank, num_ranks, Path(folder) / "store", env=env))
            for rank, num_ranks in ((0, 1), (0, 2), (1, 2))
        )
        row = Pass(((ROW_TOKENS,),))
        memory = {"one": _Measured([one], row), "two": _Measured(two, row)}
        parts = {f"rank {n}": _Measured([one], Pass(part)) for n, part in enumerate(_parts())}
        values = asyncio.run(_in_turn(memory, parts, effort))
    gradients = [sum(done.gradient for done in side.last) for side in memory.values()]
    assert abs(gradients[0] - gradients[1]) <= TOLERANCE * abs(gradients[0]), f"the sides computed {gradients}"
    what = {
        "one": f"forward and backward of a row of {ROW_TOKENS} tokens by one process",
        "two": "the same row by two ranks that share it",
        **{name: f"the part of {name} of {NUM_ROWS} rows, the longest {SKEW} times the mean" for name in parts},
    }
    series = {name: Measurements(words, UNIT, values[name]) for name, words in what.items()}
    peaks = {name: side.peak_bytes for name, side in memory.items()}
    seconds = [1 / series[name].median for name in parts]
    claims = (
        Claim("peak memory of the row: the larger of two ranks / one", peaks["two"] / peaks["one"], MAX_MEMORY, False),
        Claim(
            f"CPU time at skew {SKEW}: slowest of {NUM_RANKS} ranks / mean",
            max(seconds) / fmean(seconds),
            MAX_LOAD,
            False,
        ),
    )
    settings = {
        "row_tokens": ROW_TOKENS,
        "rows": NUM_ROWS,
        "mean_tokens": MEAN,
        "width": WIDTH,
        "blocks": NUM_BLOCKS,
        "peak_gb": {name: round(peak / 1e9, 3) for name, peak in peaks.items()},
    }
    return Findings(settings, series, claims)


async def _in_turn(
    memory: dict[str, _Measured], parts: dict[str, _Measured], effort: Effort
) -> dict[str, tuple[float, ...]]:
    return await interleave(dict[str, Side](memory), effort) | await interleave(dict[str, Side](parts), effort)


def _parts() -> list[tuple[tuple[int, ...], ...]]:
    """For each rank the lengths of its micro-batches; one row has `SKEW * MEAN` tokens, the others a long tail."""
    rng = np.random.default_rng(0)
    tail = rng.lognormal(sigma=0.8, size=NUM_ROWS - 1)
    lengths = [SKEW * MEAN, *np.maximum(1, tail * (NUM_ROWS - SKEW) * MEAN / tail.sum()).astype(int).tolist()]
    rows = [TokenSequence(np.zeros(n, dtype=np.int32), 1, (), ()) for n in lengths]
    return [
        tuple(tuple(lengths[i] for i in rows_) for rows_ in part if rows_)
        for part in split_microbatches(rows, _config(), NUM_RANKS)
    ]


class _Measured:
    """Measures the ranks of one side together, and keeps what their passes were."""

    def __init__(self, peers: Sequence[Peer[Pass, Done]], job: Pass) -> None:
        self._peers = peers
        self._job = job
        self.last: list[Done] = []
        self.peak_bytes = 0

    async def __call__(self, round_number: int) -> float:
        for peer in self._peers:
            peer.send(self._job)
        self.last = [await asyncio.to_thread(peer.receive) for peer in self._peers]
        self.peak_bytes = max(self.peak_bytes, *(done.peak_bytes for done in self.last))
        return 1 / max(done.seconds for done in self.last)
