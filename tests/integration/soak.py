"""Soak: a small run to which faults happen at random, for as long as is asked for; then what it cost.

    python tests/integration/soak.py --minutes 30

Every few seconds a process dies, hangs or is slow, and the run is scaled up and down. Every step is checked as it is
trained: no group is missing, none comes twice. Memory of driver and buffer and the bytes in the object store have to
stay where they are once the run is warm. The exit code is 1 if anything of this is violated.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS / "support")]

import mobula.deploy.host.ray_defaults  # noqa: E402, F401  isort: skip  (sets what ray reads when imported)
import ray  # noqa: E402
from fakes import FakePrompts, FakeStep  # noqa: E402
from sabotage import SLOW_S  # noqa: E402
from small_cluster import PROMPTS_PER_STEP, Shape, SmallRun, start_ray  # noqa: E402

from mobula.cluster.records.trajectory import ScoredGroup  # noqa: E402
from mobula.cluster.roles import ReplayStats, UpdateReport  # noqa: E402

MIB = 2**20
SHAPE = Shape(total_steps=10**7, num_engines=2, max_staleness=2, answer_bytes=150_000, checkpoint_interval=10)
MAX_WORKERS = 3  # of a role, by scaling
PAUSE_S = (0.5, 4.0)  # between two faults
SAMPLE_S = 2.0
STUCK_S = 180.0  # without a step
KINDS = {"killed": signal.SIGKILL, "hung": signal.SIGSTOP, "slow": signal.SIGCONT}
WARM = 0.4  # share of the run after which memory has to be flat
GROWTH = 1.15
SLACK_BYTES = 40 * MIB


class Ledger:
    """Every group that was trained, as the loop records it; only those out of order take memory."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.violations: list[str] = []
        self._prompts = FakePrompts(epoch_size=1_000_000)
        self._next = 0  # every group before this one is trained
        self._ahead: set[int] = set()
        self._last_step_s = time.monotonic()

    @property
    def num_groups(self) -> int:
        return self._next + len(self._ahead)

    @property
    def idle_s(self) -> float:
        """Seconds since the last step."""
        return time.monotonic() - self._last_step_s

    @contextmanager
    def step(self, step: int) -> Iterator[FakeStep]:
        yield _Step(self)

    def train(self, groups: Sequence[ScoredGroup]) -> None:
        self.num_steps += 1
        self._last_step_s = time.monotonic()
        for group in groups:
            index = self._prompts.index_of(group.summary.group_id)
            if index < self._next or index in self._ahead:
                self.violations.append(f"{group.summary.group_id} was trained twice")
            self._ahead.add(index)
        while self._next in self._ahead:
            self._ahead.remove(self._next)
            self._next += 1
        window = (SHAPE.max_staleness + 1) * PROMPTS_PER_STEP
        if self._ahead and max(self._ahead) - self._next > window:
            self.violations.append(f"{self._prompts.id_at(self._next)} is lost: {max(self._ahead)} is trained already")


class _Step(FakeStep):
    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def record(self, groups: Sequence[ScoredGroup], update: UpdateReport, replay: ReplayStats) -> None:
        self._ledger.train(groups)


@dataclass
class Outcome:
    """What the soak found."""

    seconds: float = 0.0
    ledger: Ledger = field(default_factory=Ledger)
    faults: Counter[str] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)
    memory: dict[str, list[float]] = field(default_factory=lambda: {"driver": [], "object store": []})

    @property
    def violations(self) -> list[str]:
        grown = [text for name, values in self.memory.items() if (text := _growth(name, values))]
        return [*self.ledger.violations, *grown]

    def lines(self) -> list[str]:
        steps, groups = self.ledger.num_steps, self.ledger.num_groups
        memory = [
            f"{name}: {median(values) / MIB:.0f} MiB in the middle, at most {max(values) / MIB:.0f}, "
            f"last {values[-1] / MIB:.0f}"
            for name, values in self.memory.items()
            if values
        ]
        return [
            f"{self.seconds:.0f} s, {steps} steps, {groups} groups, {self.faults.total()} faults",
            f"faults: {dict(sorted(self.faults.items()))}",
            f"losses: {dict(sorted(self.losses.items()))}",
            *memory,
            *(f"VIOLATED: {violation}" for violation in self.violations),
        ]


def _growth(name: str, values: Sequence[float]) -> str:
    """What is wrong with these samples, in the order in which they were taken."""
    warm = values[int(len(values) * WARM) :]
    if len(warm) < 4:
        return f"{name}: too few samples"
    early, late = median(warm[: len(warm) // 2]), median(warm[len(warm) // 2 :])
    if late <= early * GROWTH + SLACK_BYTES:
        return ""
    return f"{name} grew from {early / MIB:.0f} to {late / MIB:.0f} MiB"


class _Over(Exception):
    """The time is up."""


async def soak(folder: Path, seconds: float, seed: int) -> Outcome:
    """Run on the connected cluster for so long from its first version on, and to the next step."""
    outcome = Outcome()
    began: list[float] = []

    async def until_over(version: int) -> None:
        began.append(time.monotonic())
        del began[1:]
        if time.monotonic() - began[0] > seconds:
            raise _Over

    run = SmallRun(folder, SHAPE, on_version=until_over, metrics=outcome.ledger)
    beside = [*map(asyncio.create_task, (_sabotage(run, outcome, random.Random(seed)), _look(run, outcome)))]
    going = asyncio.create_task(run.go())
    try:
        await asyncio.wait({going, *beside}, return_when=asyncio.FIRST_COMPLETED)
        for task in beside:
            if task.done():
                task.result()
        await going
    except _Over:
        pass
    finally:
        for task in (*beside, going):
            task.cancel()
        await asyncio.gather(*beside, going, return_exceptions=True)
    outcome.seconds, outcome.losses = time.monotonic() - began[0], run.losses
    _check_weights(run, outcome)
    return outcome


def _check_weights(run: SmallRun, outcome: Outcome) -> None:
    """The learner's own state agrees with the loop."""
    trained = [group_id for step in run.trained for group_id in step]
    twice = [group_id for group_id, num in Counter(trained).items() if num > 1]
    outcome.ledger.violations += [f"the learner was trained on {group_id} twice" for group_id in twice]


async def _sabotage(run: SmallRun, outcome: Outcome, rng: random.Random) -> None:
    """Strike a random process, whatever the run is doing."""
    while outcome.ledger.num_steps == 0:
        await asyncio.sleep(0.1)
    while True:
        await asyncio.sleep(rng.uniform(*PAUSE_S))
        if rng.random() < 0.1:
            await _scale(run, outcome, rng)
            continue
        names = ["learner/0", "learner/1", *(worker.name for worker in run.workers)]
        victim, (word, sign) = rng.choice(names), rng.choice(list(KINDS.items()))
        if run.saboteur.is_there(victim):
            outcome.faults[f"{victim.partition('/')[0]} {word}"] += 1
            await _strike(run, victim, sign)
        while rng.random() < 0.7 and not run.is_whole:  # now and then the next one comes before all are back
            await asyncio.sleep(0.5)


async def _scale(run: SmallRun, outcome: Outcome, rng: random.Random) -> None:
    role = rng.choice([run.rollout_pool, run.rewards.services["reward"].pool, run.reference.pool])
    num = rng.randint(1, MAX_WORKERS)
    outcome.faults["scaled"] += 1
    await role.scale(num)


async def _strike(run: SmallRun, victim: str, sign: signal.Signals) -> None:
    process_id = run.saboteur.process_id(victim)
    try:
        os.kill(process_id, signal.SIGSTOP if sign is signal.SIGCONT else sign)
        if sign is signal.SIGCONT:
            await asyncio.sleep(SLOW_S)
            os.kill(process_id, signal.SIGCONT)
    except ProcessLookupError:
        pass  # it was ended meanwhile


async def _look(run: SmallRun, outcome: Outcome) -> None:
    """Measure memory, and report a run that stands still."""
    while True:
        await asyncio.sleep(SAMPLE_S)
        if outcome.ledger.num_steps == 0:
            continue
        if outcome.ledger.idle_s > STUCK_S:
            raise TimeoutError(f"no step for {outcome.ledger.idle_s:.0f} s: {run.workers}, {outcome.lines()}")
        outcome.memory["driver"].append(_resident_bytes(os.getpid()))
        outcome.memory["object store"].append(await asyncio.to_thread(_object_store_bytes))


def _resident_bytes(process_id: int) -> float:
    try:
        pages = int(Path(f"/proc/{process_id}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return 0.0
    return float(pages * os.sysconf("SC_PAGE_SIZE"))


def _object_store_bytes() -> float:
    has, free = ray.cluster_resources(), ray.available_resources()
    return has["object_store_memory"] - free.get("object_store_memory", 0.0)


def main() -> int:
    import argparse

    from rich.console import Console

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mobula-", dir="/tmp") as short, tempfile.TemporaryDirectory() as folder:
        start_ray(short, 512 * MIB)
        try:
            outcome = asyncio.run(soak(Path(folder), asked.minutes * 60, asked.seed))
        finally:
            ray.shutdown()
    Console(width=160).print(*outcome.lines(), sep="\n", markup=False, highlight=False)
    return 1 if outcome.violations else 0


if __name__ == "__main__":
    sys.exit(main())
