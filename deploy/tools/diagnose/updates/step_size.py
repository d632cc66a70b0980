"""Whether updates change the policy, and by how much."""

from __future__ import annotations

import math

from mobula.cluster.metrics.definitions import MetricName
from mobula.cluster.metrics.report.findings import RunFinding, RunVerdict
from mobula.deploy.tools.diagnose.records.material import Material, mean
from mobula.deploy.tools.diagnose.records.registry import SYMPTOMS, not_measured

LEARNING_RATE, SKIPPED = "learning_rate", "skipped_steps"
LARGE, HUGE = 0.5, 2.0  # nat a token and step
SMALL, NONE = 0.05, 0.01  # nat a token over the whole run, if every step moved the same way
MANY, MOST = 0.1, 0.5


def check_learning_rate(material: Material) -> RunFinding:
    """Change of the policy by an update, against what a run needs.

    A step that changes the log-prob of a trained token by p nat can change it by p * steps over the run at most.
    """
    changes, rates = material.series(MetricName.POLICY_CHANGE), material.series(MetricName.LEARNING_RATE)
    if not changes or not rates:
        return not_measured(LEARNING_RATE, "no step has policy_change (records of an earlier version)")
    change, reach = mean(changes), mean(changes) * material.config.num_steps
    weights = material.late(MetricName.WEIGHT_CHANGE) or 0.0
    numbers = {"policy_change": change, "reach": reach, "weight_change": weights, "learning_rate": max(rates)}
    measured = (
        f"an update changes the log-prob of a trained token by {change:.2g} nat and the weights by {weights:.2g} of "
        f"their norm, at a learning rate up to {max(rates):.3g}; {material.config.num_steps} steps reach {reach:.2g} "
        "nat"
    )
    verdict, action = _verdict(material, change, reach)
    explains = SYMPTOMS if change >= LARGE else ("reward_trend",)
    return RunFinding(LEARNING_RATE, verdict, measured, numbers, action, (), explains)


def _verdict(material: Material, change: float, reach: float) -> tuple[RunVerdict, str]:
    key = "learner.learning_rate"
    if change >= LARGE:
        lower = f"lower {key} by a factor of {_power_of_ten(change / 0.05):g}; check learner.max_grad_norm"
        return RunVerdict.FAULT if change >= HUGE and not material.is_learning else RunVerdict.WARNING, lower
    if reach >= SMALL or material.is_solved:
        return RunVerdict.OK, ""
    higher = (
        f"raise {key} by a factor of {_power_of_ten(1.0 / max(reach, 1e-9)):g} (full weights about 1e-6, adapters ten "
        "times that), or check why the gradient is small: uniform groups, policy.freeze, algorithm.kl.coef"
    )
    return RunVerdict.FAULT if reach < NONE and not material.is_learning else RunVerdict.WARNING, higher


def _power_of_ten(ratio: float) -> float:
    return float(10 ** max(1, round(math.log10(ratio))))


def check_skipped_steps(material: Material) -> RunFinding:
    """Share of optimizer steps that were left out, and of steps without a gradient."""
    norms = [step.values[MetricName.GRAD_NORM] for step in material.steps if MetricName.GRAD_NORM in step.values]
    skipped = sum(material.series("skipped"))
    planned = skipped + sum(material.series(MetricName.OPTIMIZER_STEPS))
    if not norms or planned == 0:
        return not_measured(SKIPPED, "no step has a gradient norm")
    share, zero = skipped / planned, sum(norm == 0 for norm in norms) / len(norms)
    finite = sorted(norm for norm in norms if math.isfinite(norm))
    middle = finite[len(finite) // 2] if finite else math.nan
    numbers = {"skipped_fraction": share, "zero_gradient_fraction": zero, "grad_norm": middle}
    measured = (
        f"{share:.1%} of {planned:.0f} optimizer steps were left out (gradient not finite); the gradient is 0 in "
        f"{zero:.1%} of the steps, its median norm {middle:.3g}"
    )
    worst = max(share, zero)
    if worst < MANY:
        return RunFinding(SKIPPED, RunVerdict.OK, measured, numbers)
    action = (
        "lower learner.learning_rate, check learner.max_grad_norm and the reward for huge values"
        if share >= zero
        else "no token has an advantage: see uniform_groups, policy.freeze, algorithm.advantage, weights of the loss"
    )
    return RunFinding(SKIPPED, RunVerdict.FAULT if worst >= MOST else RunVerdict.WARNING, measured, numbers, action)
