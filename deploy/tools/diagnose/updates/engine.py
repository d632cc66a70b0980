"""Whether engines compute the learner's distribution, with the learner's weights."""

from __future__ import annotations

from mobula.cluster.metrics.definitions import CounterName, MetricName
from mobula.cluster.metrics.report.findings import Evidence, RunFinding, RunVerdict
from mobula.deploy.tools.diagnose.records.material import Material
from mobula.deploy.tools.diagnose.records.registry import not_measured
from mobula.deploy.tools.diagnose.records.trends import Trend

GAP, STALE = "logprob_gap", "engine_weights"
NEAR = 0.3  # of the limit
GROWS = 10.0
CLASSES = {
    "all": MetricName.LOGPROB_GAP_MEAN,
    "first": MetricName.LOGPROB_GAP_FIRST,
    "last": MetricName.LOGPROB_GAP_LAST,
    "template": MetricName.LOGPROB_GAP_TEMPLATE,
}
PROMPT_CLASSES = {
    "prompt media": MetricName.CANARY_MEDIA,
    "prompt template": MetricName.CANARY_TEMPLATE,
    "prompt text": MetricName.CANARY_TEXT,
}
NUM_SHOWN = 3


def check_gap(material: Material) -> RunFinding:
    """Gap of engine and learner by class of token: first, last, template (end of text, tool calls, thinking) and all
    sampled tokens of responses; media, template and text of the probe prompt."""
    found = {name: value for name, metric in CLASSES.items() if (value := material.late(metric)) is not None}
    canary = material.series(MetricName.CANARY)
    if "all" not in found:
        return not_measured(GAP, "no trained token was sampled with the weights before its step")
    limit = _limit(material)
    of_prompt = {name: max(values) for name, metric in PROMPT_CLASSES.items() if (values := material.series(metric))}
    numbers = found | ({"prompt": max(canary)} if canary else {}) | of_prompt
    shown = ", ".join(f"{name} {value:.2g}" for name, value in numbers.items())
    trend = Trend.of(material.series(MetricName.LOGPROB_GAP_MEAN))
    measured = f"mean |log-prob of learner - engine| in nat by token: {shown}; the limit is {limit:g}"
    growth = trend is not None and trend.rises and trend.last > GROWS * trend.first and trend.last > 0.01 * limit
    action = (
        "do not trust the run before the gap is explained: docs/numerics.md; `mobula doctor WORDS` checks the model's "
        "files, weight_sync.canary_interval=1 every push"
    )
    worst = max(found.values())
    if worst > limit:
        return RunFinding(GAP, RunVerdict.FAULT, measured, numbers, action)
    if worst > NEAR * limit or growth:
        return RunFinding(GAP, RunVerdict.WARNING, measured, numbers, action)
    return RunFinding(GAP, RunVerdict.OK, measured, numbers)


def check_weights(material: Material) -> RunFinding:
    """Whether pushed weights arrive: canary of the probe prompt, pushes, and engines that were replaced."""
    pushes = sum(material.count(CounterName.WEIGHT_SYNCS).values())
    canary = material.series(MetricName.CANARY)
    limit = _limit(material)
    faults = [fault for fault in (material.run.faults if material.run else ()) if _concerns_weights(fault.cause)]
    steps = len(material.steps)
    worst = max(canary, default=0.0)
    numbers = {"num_pushes": float(pushes), "canary_max": worst, "num_engines_replaced": float(len(faults))}
    measured = (
        f"{pushes} pushes in {steps} steps; engine and learner differ by {worst:.2g} nat at most on the probe prompt; "
        f"{len(faults)} engines were replaced because of their weights"
    )
    action = "docs/numerics.md; read logs/ of the engine, and check a sampler of your own (sampler.kind) for its push"
    evidence = tuple(
        Evidence(f"step {fault.step}, {fault.worker}: {fault.cause[:400]}") for fault in faults[:NUM_SHOWN]
    )
    if faults or worst > limit or pushes < steps:
        return RunFinding(STALE, RunVerdict.FAULT, measured, numbers, action, evidence)
    return RunFinding(STALE, RunVerdict.OK, measured, numbers)


def _limit(material: Material) -> float:
    """Returns the configured limit of the gap, in nat."""
    limits = material.config.supervision.max_logprob_gap
    return limits.float32 if material.config.resources.dtype == "float32" else limits.bfloat16


def _concerns_weights(cause: str) -> bool:
    text = cause.casefold()
    return "canary" in text or "probe prompt" in text or "weights" in text
