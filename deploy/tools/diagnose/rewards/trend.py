"""Whether the trained reward rises over the run."""

from __future__ import annotations

from mobula.cluster.metrics.definitions import MetricName
from mobula.cluster.metrics.report.findings import RunFinding, RunVerdict
from mobula.deploy.tools.diagnose.records.material import Material
from mobula.deploy.tools.diagnose.records.registry import SYMPTOMS, not_measured
from mobula.deploy.tools.diagnose.records.trends import MIN_POINTS

NAME = "reward_trend"
FALLS = (
    "the policy unlearns what is rewarded: check the sign of advantages and loss (algorithm.advantage, algorithm.loss "
    "and rewards of your own), that rewards belong to their responses, and learner.learning_rate"
)


def check_trend(material: Material) -> RunFinding:
    """Compares the mean reward of the first and the last quarter of the steps."""
    trend = material.trend(MetricName.REWARD_MEAN)
    if trend is None:
        num = len(material.steps)
        return not_measured(NAME, f"{num} of {MIN_POINTS} steps that a trend needs are finished")
    measured = (
        f"the mean reward goes from {trend.first:.3g} (first quarter) to {trend.last:.3g} (last quarter of {trend.num} "
        f"steps), {trend.z:+.1f} standard errors"
    )
    numbers = {"first": trend.first, "last": trend.last, "z": trend.z}
    if trend.rises or material.is_solved:
        return RunFinding(NAME, RunVerdict.OK, measured, numbers)
    if trend.falls:
        # What a falling reward leaves behind is no cause of it.
        followed = tuple(name for name in SYMPTOMS if name != NAME)
        return RunFinding(NAME, RunVerdict.WARNING, measured, numbers, FALLS, (), followed)
    return RunFinding(
        NAME, RunVerdict.NOTICE, measured, numbers, "see the other findings; the first ones are the most likely causes"
    )
