"""What a rehearsal records, and the load of the driver."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mobula.cluster.metrics.step_records import EvaluationRecord, StepRecord
from mobula.configs.schema import RunConfig


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


# CPU seconds of the driver's process inside Ray, which a rehearsal does not run. A trajectory: the difference of the
# two sides of benchmarks/driver_overhead.py. A call: `remote` and its answer. A borrowed reference: a rank
# receives the references of its share, and Ray notes each of them. Both measured with 6 actors on 2 cores.
RAY_TRAJECTORY_S = 0.38e-3


RAY_CALL_S = 0.36e-3


RAY_BORROWED_S = 5e-6


CALLS_OF_RANK = 2  # of a step: update and send_weights


CALLS_OF_ENGINE = 1  # receive_weights


@dataclass(frozen=True)
class DriverLoad:
    """CPU seconds of the driver for one step."""

    measured_s: float  # coordination, and prompts that the driver prepares
    ray_s: float  # estimated
    step_s: float

    @property
    def share(self) -> float:
        """Of one core during the step; at 1 the driver is the bottleneck."""
        return (self.measured_s + self.ray_s) / self.step_s


def driver_load(config: RunConfig, steps: Sequence[RehearsedStep]) -> DriverLoad:
    """The mean over `steps`."""
    algorithm, resources = config.algorithm, config.resources
    num_checks = sum(step.seconds["total"] for step in steps) / len(steps) / config.supervision.interval_s
    of_step = CALLS_OF_RANK * resources.learner.num_workers + CALLS_OF_ENGINE * resources.rollout.num_workers
    calls = of_step + num_checks * sum(role.num_workers for role in resources.roles.values())
    trajectories = algorithm.prompts_per_step * algorithm.samples_per_prompt
    borrowed = sum(step.borrowed for step in steps) / len(steps)
    return DriverLoad(
        measured_s=sum(step.driver_cpu_s for step in steps) / len(steps),
        ray_s=RAY_TRAJECTORY_S * trajectories + RAY_CALL_S * calls + RAY_BORROWED_S * borrowed,
        step_s=sum(step.seconds["total"] for step in steps) / len(steps),
    )
