"""Recording: the measurements of a rehearsal, step by step."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mobula.cluster.metrics.step_records import EvaluationRecord, StepRecord


@dataclass(frozen=True)
class Moment:
    """Totals at the end of a step. Times are virtual, but for `driver_cpu_s`."""

    at_s: float
    driver_cpu_s: float  # measured: CPU time of the coordination code
    busy_s: Mapping[str, float]  # role -> seconds of work, summed over its workers
    tokens: int  # decoded
    store_bytes: Mapping[str, int]  # node -> bytes of groups and media
    borrowed: int  # references that the learner ranks have received


@dataclass(frozen=True)
class RehearsedStep:
    """One step of a rehearsal."""

    step: int
    seconds: Mapping[str, float]  # phase -> virtual seconds
    staleness: Mapping[int, int]  # lag in versions -> trained tokens
    driver_cpu_s: float
    borrowed: int  # references that the learner ranks have received
    utilisation: Mapping[str, float]  # role -> share of its workers' time
    values: Mapping[str, float]
    counters: Mapping[str, Mapping[str, int]]


@dataclass
class Recording:
    """Implements `Sink`: keeps the records of a rehearsal with the totals at the end of each step."""

    look: Callable[[], Moment]
    num_workers: Mapping[str, int]
    name: str = "rehearsal"
    steps: list[RehearsedStep] = field(default_factory=list)
    _before: Moment | None = None

    def begin(self) -> None:
        self._before = self.look()

    def emit(self, record: StepRecord) -> None:
        now, before = self.look(), self._before
        assert before is not None, "begin() is called before the first step"
        passed_s = now.at_s - before.at_s
        utilisation = {
            role: (now.busy_s[role] - before.busy_s.get(role, 0.0)) / (passed_s * num)
            for role, num in self.num_workers.items()
            if role in now.busy_s and passed_s > 0
        }
        self.steps.append(
            RehearsedStep(
                step=record.step,
                seconds=dict(record.seconds),
                staleness=dict(record.staleness),
                driver_cpu_s=now.driver_cpu_s - before.driver_cpu_s,
                borrowed=now.borrowed - before.borrowed,
                utilisation=utilisation,
                values=dict(record.values),
                counters=record.counters,
            )
        )
        self._before = now

    def emit_evaluation(self, record: EvaluationRecord) -> None:
        """Simulated responses have no accuracy."""

    def close(self) -> None:
        """Nothing is held."""


def warm(steps: Sequence[RehearsedStep]) -> Sequence[RehearsedStep]:
    """The steps without the first, which fills the pipeline, and the last, which ends it; all if there are few."""
    num = max(1, len(steps) // 8)
    return steps[num:-num] if len(steps) > 3 * num else steps


def mean_phases(steps: Sequence[RehearsedStep]) -> dict[str, float]:
    """Phase -> mean seconds of a step."""
    names = dict.fromkeys(name for step in steps for name in step.seconds)
    return {name: sum(step.seconds.get(name, 0.0) for step in steps) / len(steps) for name in names}


def staleness_shares(steps: Sequence[RehearsedStep]) -> dict[int, float]:
    """Lag in versions -> share of the trained tokens."""
    tokens = Counter[int]()
    for step in steps:
        tokens.update(step.staleness)
    total = max(1, tokens.total())
    return {lag: num / total for lag, num in sorted(tokens.items())}


def loop_s() -> float:
    """Seconds of the virtual clock."""
    return asyncio.get_running_loop().time()
