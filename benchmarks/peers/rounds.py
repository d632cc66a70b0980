"""Sides that take turns, the memory of each, and the ratios of one side to the others."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.harness.apart import NICENESS
from benchmarks.harness.stage import scratch_folder
from benchmarks.peers.step_clock import MARK, Run

NUM_CORES = 2
LOOK_S = 0.5  # shortest time between two looks at memory
LOOKS_APART = 50  # times as long as a look takes: looking takes 2 % of a core
TIMEOUT_S = 3600.0
MIB = 2**20


@dataclass(frozen=True)
class Side:
    """One trainer. `command` gives the words of its process, whose output goes into the given folder."""

    name: str
    command: Callable[[Path], Sequence[str]]
    niceness: int = NICENESS  # 0 for a job on Ray, which gives its workers that much itself
    num_ahead: int = 0  # steps that may be sampled ahead: not counted at either end


@dataclass(frozen=True)
class Round:
    """One run of a side without its first and last steps; `peak_mib` is of its process tree, shared pages once."""

    samples: int
    tokens: int
    steps: int
    seconds: float
    peak_mib: float
    reached_s: float | None = None

    def rate(self, unit: str) -> float:
        """`unit` is `samples` or `tokens`; a second."""
        return {"samples": self.samples, "tokens": self.tokens}[unit] / self.seconds


def take_turns(sides: Sequence[Side], num_rounds: int, measure: Callable[[Side], Round]) -> dict[str, list[Round]]:
    """A B A B ...: every side once a round, so that a drift of the machine meets all alike."""
    measured: dict[str, list[Round]] = {side.name: [] for side in sides}
    for _ in range(num_rounds):
        for side in sides:
            measured[side.name].append(measure(side))
    return measured


def ratios(ours: Sequence[Round], other: Sequence[Round], unit: str) -> list[float]:
    """Units a second of ours over the other's, round by round: the machine may be faster in one round than in the
    next."""
    return [own.rate(unit) / others.rate(unit) for own, others in zip(ours, other, strict=True)]


def run_once(side: Side, num_warmup: int) -> Round:
    """One process from start to end on the first two cores.

    Raises:
        RuntimeError: it failed or reported nothing; the message has the end of its output.
    """
    cores = set(sorted(os.sched_getaffinity(0))[:NUM_CORES])
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}  # OMP takes a thread a core

    def confine() -> None:
        os.nice(side.niceness)
        os.sched_setaffinity(0, cores)

    with scratch_folder() as folder, (folder / "log").open("w+") as log:
        process = subprocess.Popen(side.command(folder), stdout=log, stderr=log, env=env, preexec_fn=confine)
        with _watched(process.pid) as peak:
            code = process.wait(TIMEOUT_S)
        lines = (folder / "log").read_text(errors="replace").splitlines()
    reports = [line.partition(MARK)[2] for line in lines if MARK in line]
    if code or not reports:
        raise RuntimeError(f"{side.name} ended with {code} and {len(reports)} reports:\n" + "\n".join(lines[-40:]))
    return counted(Run(**json.loads(reports[-1])), num_warmup + side.num_ahead, 1 + side.num_ahead, peak())


def counted(run: Run, first: int, last: int, peak_mib: float) -> Round:
    """The steps of a run but the first and last so many: imports, caches, final evaluation and checkpoint.

    Raises:
        ValueError: no step is left.
    """
    kept = slice(first, len(run.seconds) - last)
    if not run.seconds[kept]:
        raise ValueError(f"{len(run.seconds)} steps, of which the first {first} and last {last} do not count: ask more")
    totals = (sum(run.samples[kept]), sum(run.tokens[kept]), len(run.seconds[kept]), sum(run.seconds[kept]))
    return Round(*totals, peak_mib, run.reached_s)


@contextmanager
def _watched(process_id: int) -> Iterator[Callable[[], float]]:
    """Gives the most MiB that the process and all below it held at a time while the body runs."""
    most, is_over = [0], threading.Event()

    def look() -> None:
        wait_s = LOOK_S
        while not is_over.wait(wait_s):
            since = time.perf_counter()
            with suppress(psutil.NoSuchProcess):
                root = psutil.Process(process_id)
                most[0] = max(most[0], sum(map(_proportional, [root, *root.children(recursive=True)])))
            # The kernel walks every page of every process: a look at twenty processes takes a third of a second.
            wait_s = max(LOOK_S, LOOKS_APART * (time.perf_counter() - since))

    thread = threading.Thread(target=look, name="look at memory")
    thread.start()
    try:
        yield lambda: most[0] / MIB
    finally:
        is_over.set()
        thread.join()


def _proportional(process: psutil.Process) -> int:
    """Bytes in memory; of a page that n processes share, the n-th part. 0 once it has ended."""
    with suppress(psutil.Error, FileNotFoundError, ProcessLookupError):
        return process.memory_full_info().pss
    return 0
