"""Plays a configuration: the wiring of a run around simulated roles, in virtual time."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from mobula.cluster.controller import GroupQueue
from mobula.cluster.errors import MobulaError
from mobula.cluster.metrics.definitions import CounterName
from mobula.cluster.metrics.hub import Metrics
from mobula.cluster.metrics.step_records import EvaluationRecord, StepRecord
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.recovery.stop_request import StopRequest
from mobula.cluster.roles import ReplayStats
from mobula.cluster.runtime.concurrency import run_all
from mobula.cluster.runtime.gc_tuning import tune_gc
from mobula.configs.schema import RunConfig
from mobula.deploy.rehearsal.roles import LEARNER, Hardware, SimulatedRoles
from mobula.deploy.rehearsal.simulated.engine import Observed
from mobula.deploy.rehearsal.simulated.machine import (
    RESTORED_S,
    PlannedFault,
    ResponseLengths,
    VirtualTimeLoop,
    disk_error,
    run_virtually,
)
from mobula.deploy.wiring.build import build_controller
from mobula.deploy.wiring.persistence import RunContext
from mobula.deploy.wiring.preparation import Prepared


@dataclass(frozen=True)
class Moment:
    """Totals at the end of a step. Times are virtual, but for `driver_cpu_s`."""

    at_s: float
    driver_cpu_s: float  # measured: CPU time of the coordination code
    busy_s: Mapping[str, float]  # role -> seconds of work, summed over its workers
    borrowed: int  # references that the learner ranks have received


@dataclass(frozen=True)
class RehearsedStep:
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
    names = dict.fromkeys(name for step in steps for name in step.seconds)
    return {name: sum(step.seconds.get(name, 0.0) for step in steps) / len(steps) for name in names}


def staleness_shares(steps: Sequence[RehearsedStep]) -> dict[int, float]:
    tokens = Counter[int]()
    for step in steps:
        tokens.update(step.staleness)
    total = max(1, tokens.total())
    return {lag: num / total for lag, num in sorted(tokens.items())}


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


LOOKS_A_STEP = 8  # how often a fault looks for its step


@dataclass(frozen=True)
class Played:
    steps: Sequence[RehearsedStep]
    store_peak: Mapping[str, int]  # node -> most bytes in its object store
    driver_s: float  # CPU seconds of the driver's code, measured
    simulation_s: float  # CPU seconds of the simulated parts
    wall_s: float  # of the rehearsal
    virtual_s: float
    num_tokens: int  # decoded
    events: Sequence[str] = ()  # faults, and the losses that followed
    error: str = ""  # why the run ended before its last step
    counters: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def play(
    prepared: Prepared,
    hardware: Hardware,
    lengths: ResponseLengths,
    faults: Sequence[PlannedFault] = (),
    max_wall_s: float = math.inf,
) -> Played:
    """Runs the configuration of `prepared` from its first step to its last. A fault may end it before, and so does
    `max_wall_s` on this machine."""
    with TemporaryDirectory(prefix="mobula-rehearsal-") as folder:
        config = rehearsed(prepared.config, Path(folder))
        return run_virtually(_play(replace(prepared, config=config), hardware, lengths, faults, max_wall_s))


def rehearsed(config: RunConfig, folder: Path) -> RunConfig:
    """The configuration without warm start, and without the files that need the content of responses."""
    replay = config.replay.model_copy(update={"journal": False, "trajectory_log": False})
    warm_start = config.warm_start.model_copy(update={"num_steps": 0})
    evaluation = config.evaluation.model_copy(update={"save_responses": False})
    changes = {"folder": folder, "replay": replay, "warm_start": warm_start, "evaluation": evaluation}
    return config.model_copy(update=changes)


async def _play(
    prepared: Prepared, hardware: Hardware, lengths: ResponseLengths, faults: Sequence[PlannedFault], max_wall_s: float
) -> Played:
    loop, wall_s = asyncio.get_running_loop(), time.perf_counter()
    config = prepared.config
    config.run_folder.mkdir(parents=True)
    observed = Observed(hardware.driver_node)
    events: list[str] = []
    counted: list[Metrics] = []

    def on_lost(kind: str) -> None:
        events.append(f"{loop.time():.0f} s: {kind}")
        counted[0].count(CounterName.RESTARTS, kind)

    roles = SimulatedRoles(config, hardware, lengths, observed, on_lost)

    def look() -> Moment:
        return Moment(
            at_s=loop.time(), driver_cpu_s=observed.cpu.driver_s, busy_s=roles.busy_s(), borrowed=roles.ranks.borrowed
        )

    num_workers = {role: len(hardware.placement.of_role(role)) for role in config.resources.roles}
    recording = Recording(look, {role: num for role, num in num_workers.items() if num})
    metrics = Metrics([recording], loop.time, accuracy_component=config.rewards.accuracy_component)
    counted.append(metrics)
    error = ""
    running = asyncio.create_task(_run(prepared, roles, metrics, recording, faults, events), name="rehearsal")
    assert isinstance(loop, VirtualTimeLoop)
    loop.after_wall_s(max_wall_s, running.cancel)
    try:
        await running
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        error = f"ended after {max_wall_s:g} s here, with {len(recording.steps)} of {config.num_steps} steps"
    except MobulaError as failure:
        error = f"{type(failure).__name__}: {failure}"
        events.append(f"{loop.time():.0f} s: the run ends: {error}")
    return Played(
        steps=recording.steps,
        store_peak=dict(observed.store.peak),
        driver_s=observed.cpu.driver_s,
        simulation_s=observed.cpu.simulation_s,
        wall_s=time.perf_counter() - wall_s,
        virtual_s=loop.time(),
        num_tokens=observed.num_tokens(),
        events=events,
        error=error,
        counters={name: metrics.counts(name) for name in CounterName if metrics.counts(name)},
    )


async def _run(
    prepared: Prepared,
    roles: SimulatedRoles,
    metrics: Metrics,
    recording: Recording,
    faults: Sequence[PlannedFault],
    events: list[str],
) -> None:
    inference, training = roles.inference(), roles.training()
    await run_all(training.learner.start(), inference.rollouts.start(), inference.rewards.start())
    stop = StopRequest(deadline_s=prepared.config.timeouts.stop_checkpoint_s, progress=metrics.progress)
    controller = build_controller(prepared, inference, training, RunContext(prepared.config, metrics, stop), ())
    controller = replace(controller, replay=_TimedQueue(controller.replay, roles.compute_driver))
    tune_gc()
    recording.begin()
    pending = [
        asyncio.create_task(_strike(fault, roles, metrics, events), name=f"fault {fault.kind}") for fault in faults
    ]
    try:
        await controller.run()
    finally:
        for task in pending:
            task.cancel()


@dataclass(frozen=True)
class _TimedQueue:
    """Implements `GroupQueue`: the driver computes between the phases of a step."""

    queue: GroupQueue
    compute: Callable[[], Awaitable[None]]

    async def take(self, num_groups: int) -> list[ScoredGroup]:
        return await self.queue.take(num_groups)

    async def release(self, groups: Sequence[ScoredGroup]) -> None:
        await self.queue.release(groups)
        await self.compute()

    async def stats(self) -> ReplayStats:
        return await self.queue.stats()


async def _strike(fault: PlannedFault, roles: SimulatedRoles, metrics: Metrics, events: list[str]) -> None:
    """Waits for the middle of the fault's step, causes it, and ends it after its time."""
    loop, step_s = asyncio.get_running_loop(), 1.0
    while (progress := metrics.progress()).step < fault.step:
        step_s = progress.step_s or step_s
        await asyncio.sleep(step_s / LOOKS_A_STEP)
    await asyncio.sleep(step_s / 2)
    node_id = fault.node_id or roles.places(LEARNER)[-1].node_id
    events.append(f"{loop.time():.0f} s: {fault.kind} of {node_id} in step {metrics.progress().step}")
    end = partial(events.append, f"{node_id} is back")
    match fault.kind:
        case "slow_node":
            roles.slow_down(node_id, fault.factor)
            if fault.seconds:
                await asyncio.sleep(fault.seconds)
                roles.slow_down(node_id, 1.0)
                end()
        case "full_disk":
            roles.ranks.disk_error = disk_error()
            if fault.seconds:
                await asyncio.sleep(fault.seconds)
                roles.ranks.disk_error = None
        case _:
            seconds = fault.seconds or (RESTORED_S if fault.kind == "preemption" else 0.0)
            lost = roles.lose(node_id, returns=seconds > 0)
            events.append(f"{loop.time():.0f} s: {len(lost)} workers of {node_id} are lost: {', '.join(lost)}")
            if seconds:
                await asyncio.sleep(seconds)
                roles.restore(node_id)
                end()
