"""Shares of tokens whose gradient is cut: clipped ratios, and tokens older than the allowed age."""

from __future__ import annotations

from mobula.cluster.metrics.definitions import CounterName, MetricName
from mobula.cluster.metrics.report.findings import RunFinding, RunVerdict
from mobula.deploy.tools.diagnose.records.material import Material
from mobula.deploy.tools.diagnose.records.registry import not_measured

CLIPPED, OVER_AGE, REJECTED = "clipped_tokens", "over_age_tokens", "rejected_groups"
MANY, MOST = 0.2, 0.6


def check_clipped(material: Material) -> RunFinding:
    """Share of trained tokens whose ratio is clipped."""
    share = material.late(MetricName.CLIP_FRACTION)
    if share is None:
        return not_measured(CLIPPED, "no step has a clipped share")
    ratio = max(material.series("ratio_max"), default=1.0)
    numbers = {"clip_fraction": share, "ratio_max": ratio}
    measured = f"{share:.1%} of the late trained tokens are clipped; the largest ratio of the run is {ratio:.3g}"
    action = "lower learner.learning_rate, algorithm.num_minibatches or algorithm.num_epochs"
    return _of_share(CLIPPED, share, measured, numbers, action)


def check_over_age(material: Material) -> RunFinding:
    """Share of trained tokens that are older than `algorithm.max_staleness`."""
    tokens = sum(material.series(MetricName.NUM_TOKENS))
    if tokens == 0:
        return not_measured(OVER_AGE, "no token was trained")
    share = sum(material.series(MetricName.OVER_AGE_TOKENS)) / tokens
    oldest, bound = max(material.series(MetricName.STALENESS_MAX), default=0.0), material.config.algorithm.max_staleness
    numbers = {"over_age_fraction": share, "staleness_max": oldest}
    measured = (
        f"{share:.1%} of the tokens are older than algorithm.max_staleness={bound}; the oldest is {oldest:.0f} versions"
    )
    action = "lower algorithm.max_concurrent_groups, add rollout workers, or use algorithm=decoupled_ppo"
    return _of_share(OVER_AGE, share, measured, numbers, action)


def check_rejected(material: Material) -> RunFinding:
    """Share of finished groups that were not trained."""
    rejected = material.count(CounterName.REJECTED)
    trained, lost = sum(material.series(MetricName.NUM_GROUPS)), float(sum(rejected.values()))
    if trained + lost == 0:
        return not_measured(REJECTED, "no group was finished")
    share = lost / (trained + lost)
    reasons = ", ".join(f"{reason} {num}" for reason, num in sorted(rejected.items(), key=lambda item: -item[1]) if num)
    measured = f"{share:.1%} of {trained + lost:.0f} finished groups were not trained" + (
        f" ({reasons})" if reasons else ""
    )
    action = (
        "the reasons: uniform, see uniform_groups; too_few_scored, see reward_parser; over_age, see over_age_tokens"
    )
    return _of_share(REJECTED, share, measured, {"rejected_fraction": share, "num_rejected": lost}, action)


def _of_share(name: str, share: float, measured: str, numbers: dict[str, float], action: str) -> RunFinding:
    verdict = RunVerdict.FAULT if share >= MOST else RunVerdict.WARNING if share >= MANY else RunVerdict.OK
    return RunFinding(name, verdict, measured, numbers, "" if verdict is RunVerdict.OK else action)
