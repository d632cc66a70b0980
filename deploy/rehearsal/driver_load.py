"""Driver load: the CPU time of the driver for a step, measured in the rehearsal and added for Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mobula.configs.schema import RunConfig
from mobula.deploy.rehearsal.recording import RehearsedStep

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
