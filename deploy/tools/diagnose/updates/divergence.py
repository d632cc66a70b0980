"""KL divergence from the reference, the weight of its term, and the entropy of the policy."""

from __future__ import annotations

from mobula.cluster.metrics.definitions import MetricName
from mobula.cluster.metrics.report.findings import RunFinding, RunVerdict
from mobula.deploy.tools.diagnose.records.material import Material
from mobula.deploy.tools.diagnose.records.registry import SYMPTOMS, not_measured

KL, KL_WEIGHT, ENTROPY = "kl", "kl_weight", "entropy"
FAR = 1.0  # nat a token
STRONG, HOLDS = 0.3, 2.0  # coefficients
LOW = 0.01  # nat a token
DIVERSE = "raise sampler.temperature, set algorithm.entropy.bonus, use algorithm=dapo, or lower learner.learning_rate"


def check_kl(material: Material) -> RunFinding:
    """How far the policy is from the reference."""
    trend = material.trend(MetricName.KL)
    if trend is None:
        coef = material.config.algorithm.kl.coef
        return not_measured(KL, f"no reference, or too few steps (algorithm.kl.coef={coef:g})")
    numbers = {"first": trend.first, "last": trend.last}
    measured = (
        f"KL from the reference: {trend.first:.2g} (first quarter) to {trend.last:.2g} nat a token (last quarter)"
    )
    if trend.last >= FAR and not material.is_learning:
        action = "raise algorithm.kl.coef, lower learner.learning_rate; go back to an earlier checkpoint"
        return RunFinding(KL, RunVerdict.WARNING, measured, numbers, action)
    return RunFinding(KL, RunVerdict.NOTICE if trend.last >= FAR else RunVerdict.OK, measured, numbers)


def check_kl_weight(material: Material) -> RunFinding:
    """Whether the KL term leaves room to learn.

    With a loss of -A r + c KL and standardised advantages A of about 1, the best policy differs from the reference by
    A / c nat a token.
    """
    config = material.config.algorithm.kl
    room = 1.0 / config.coef if config.coef > 0 else float("inf")
    numbers = {"coef": config.coef, "kl_last": material.late(MetricName.KL) or 0.0}
    if config.coef == 0:
        return RunFinding(KL_WEIGHT, RunVerdict.OK, "algorithm.kl.coef=0: no KL term", numbers)
    measured = (
        f"algorithm.kl.coef={config.coef:g} ({config.place}): an advantage of 1 moves a log-prob by {room:.2g} nat "
        f"at most; measured KL of the late steps {numbers['kl_last']:.2g} nat a token"
    )
    if config.controller == "adaptive" or config.coef < STRONG:
        return RunFinding(KL_WEIGHT, RunVerdict.OK, measured, numbers)
    verdict = RunVerdict.FAULT if config.coef >= HOLDS and not material.is_learning else RunVerdict.WARNING
    return RunFinding(KL_WEIGHT, verdict, measured, numbers, "lower algorithm.kl.coef; values of 0 to 0.05 are usual")


def check_entropy(material: Material) -> RunFinding:
    """Whether the policy still explores."""
    early, late = material.early(MetricName.ENTROPY), material.late(MetricName.ENTROPY)
    if early is None or late is None:
        return not_measured(ENTROPY, "no step has an entropy")
    numbers = {"early": early, "late": late}
    measured = f"entropy of the sampled distribution: {early:.3g} early, {late:.3g} nat a token late"
    if late >= LOW or material.is_solved:
        trend = material.trend(MetricName.ENTROPY)
        grows = trend is not None and trend.rises and late > 3 * early and not material.is_learning
        if not grows:
            return RunFinding(ENTROPY, RunVerdict.OK, measured, numbers)
        bonus = material.config.algorithm.entropy.bonus
        action = f"the policy becomes random: lower algorithm.entropy.bonus={bonus:g} or learner.learning_rate"
        # A bonus is an intervention; without it the entropy grows for another reason.
        return RunFinding(ENTROPY, RunVerdict.WARNING, measured, numbers, action, (), SYMPTOMS if bonus > 0 else ())
    verdict = RunVerdict.FAULT if early < LOW and not material.is_learning else RunVerdict.WARNING
    return RunFinding(ENTROPY, verdict, measured, numbers, DIVERSE)
