"""Step breakdown: which share of the main job's steps goes into which phase."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

from rich.console import Console

from benchmarks.harness.measure import Claim, Effort, Findings, Measurements
from benchmarks.harness.stage import private_ray, scratch_config
from mobula.cluster.metrics.report.run_folder import read_run_folder
from mobula.cluster.metrics.step_records import StepRecord
from mobula.configs.schema import RunConfig
from mobula.deploy.run.runtime import run_training

PHASES = {
    "wait_for_rollouts": "waiting for the step's groups",
    "reference": "log-probs of the frozen policy",
    "update": "forward, backward and optimizer step",
    "weight_sync": "push to the engines, with its canary where one is due",
    "evaluation": "held-out evaluation, where one is due",
    "checkpoint": "checkpoint, where one is due",
    "other": "everything else: releasing and recording",
}
BESIDE = ("evaluation", "checkpoint")
TARGET = 0.1


def measure(effort: Effort, overrides: Sequence[str]) -> Findings:
    """One training run as `mobula train` does it; its own clock tells the phases apart."""
    with scratch_config((f"num_steps={effort.num_steps}",), overrides) as config, private_ray(config):
        summary = run_training(config, Console(stderr=True))
        steps = read_run_folder(config.run_folder).steps
    return findings(config, steps, {"wall_s": summary.wall_s, "samples_per_s": summary.samples_per_s})


def share(steps: Sequence[StepRecord], *phases: str) -> float:
    """The part of all steps' seconds that these phases took; a phase that never ran took none."""
    spent = fsum(seconds for step in steps for phase, seconds in step.phases.items() if phase in phases)
    return spent / fsum(step.seconds["total"] for step in steps)


def findings(config: RunConfig, steps: Sequence[StepRecord], settings: dict[str, object]) -> Findings:
    """Shares over all steps; the series hold each step's seconds."""
    unknown = {phase for step in steps for phase in step.phases} - set(PHASES)
    if unknown:
        raise ValueError(f"this breakdown does not know the phases {sorted(unknown)} of the run: add them to PHASES")
    timed = [phase for phase in PHASES if any(phase in step.phases for step in steps)]
    series = {
        phase: Measurements(PHASES[phase], "s", tuple(s.phases[phase] if phase in s.phases else 0.0 for s in steps))
        for phase in timed
    }
    claims = [Claim("everything else / step", share(steps, "other"), TARGET, at_least=False)]
    claims += [Claim("everything else with evaluation and checkpoints / step", share(steps, "other", *BESIDE))]
    claims += [Claim(f"{phase} / step", share(steps, phase)) for phase in timed if phase != "other"]
    run = {
        "steps": len(steps),
        "prompts_per_step": config.algorithm.prompts_per_step,
        "samples_per_prompt": config.algorithm.samples_per_prompt,
        "max_staleness": config.algorithm.max_staleness,
    }
    return Findings({**run, **settings}, series, tuple(claims))
