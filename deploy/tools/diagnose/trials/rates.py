"""Scan of the learning rate on recorded groups: gain on groups that the step did not train."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from mobula.cluster.metrics.report.findings import RunFinding, RunVerdict
from mobula.deploy.tools.diagnose.records.registry import not_measured
from mobula.deploy.tools.diagnose.trials.recorded import TrialGroup, TrialLearner, response_logprob

NAME = "learning_rate_scan"
FACTORS = (0.1, 1.0, 10.0)
MIN_GROUPS, NUM_HELD_OUT = 8, 8
NUM_UPDATES = 4
FAR = 10.0

Start = Callable[[float], Awaitable[TrialLearner]]
"""Starts a learner whose learning rate is the configured one times a factor."""


async def gain(learner: TrialLearner, groups: Sequence[TrialGroup]) -> tuple[float, float]:
    """Returns the gain of `NUM_UPDATES` steps on one half of the groups for the other half, and its standard error.

    The gain of a group is the mean of advantage times change of the log-prob of its responses, in nat a token: the
    first-order change of its reward, in standard deviations.
    """
    held_out, trained = groups[:NUM_HELD_OUT], groups[NUM_HELD_OUT:]
    before = [await _logprobs(learner, group) for group in held_out]
    for _ in range(NUM_UPDATES):
        await learner.update([group.scored for group in trained])
    gains = [
        float(np.mean(group.advantages * (await _logprobs(learner, group) - old)))
        for group, old in zip(held_out, before, strict=True)
    ]
    return float(np.mean(gains)), float(np.std(gains, ddof=1) / math.sqrt(len(gains)))


async def _logprobs(learner: TrialLearner, group: TrialGroup) -> np.ndarray:
    """Returns float64 [N]: the mean log-prob of each response, in nat a token."""
    return np.array([await response_logprob(learner, group.prompt, each) for each in group.trajectories])


async def scan(start: Start, groups: Sequence[TrialGroup], state: Path) -> RunFinding:
    """Measures the gain at some multiples of `learner.learning_rate`, each from the same state."""
    useful = [group for group in groups if not group.is_uniform]
    if len(useful) < NUM_HELD_OUT + MIN_GROUPS:
        return not_measured(NAME, f"{len(useful)} of {NUM_HELD_OUT + MIN_GROUPS} groups have different rewards")
    found: dict[float, tuple[float, float]] = {}
    for factor in FACTORS:
        learner = await start(factor)
        await learner.load(state)
        found[factor] = await gain(learner, useful)
    return judged(found)


def judged(found: Mapping[float, tuple[float, float]]) -> RunFinding:
    """Returns the finding on factor -> (gain, standard error)."""
    numbers = {f"gain_x{factor:g}": value for factor, (value, _) in found.items()}
    shown = ", ".join(f"x{factor:g}: {value:+.3g} ± {error:.2g}" for factor, (value, error) in found.items())
    measured = f"gain on groups that were not trained, in nat a token, by the factor of the learning rate: {shown}"
    own, error = found[1.0]
    best = max(found, key=lambda factor: found[factor][0])
    best_gain, best_error = found[best]
    is_sure = best_gain - own > 2 * math.hypot(error, best_error)
    if best == 1.0 or not is_sure or best_gain < FAR * max(own, 0.0) and best > 1:
        return RunFinding(NAME, RunVerdict.OK, measured, numbers)
    action = f"try learner.learning_rate times {best:g}"
    return RunFinding(NAME, RunVerdict.WARNING, measured, numbers, action)
