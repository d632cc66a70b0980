"""Checks of updates."""

from __future__ import annotations

import math
from dataclasses import replace

from mobula.cluster.metrics.definitions import CounterName, MetricName
from mobula.cluster.metrics.report.run_folder import Evidence, RunFinding, RunFolder, RunVerdict
from mobula.deploy.report.diagnose.material import (
    SYMPTOMS,
    Material,
    Needs,
    Trend,
    by_share,
    check,
    finding,
    mean,
    unmeasured,
)

FAR = 1.0  # nat a token
STRONG, HOLDS = 0.3, 2.0  # coefficients
LOW = 0.01  # nat a token
DIVERSE = "raise sampler.temperature, set algorithm.entropy.bonus, use algorithm=dapo, or lower learner.learning_rate"


@check("kl", Needs.STEPS)
def check_kl(material: Material) -> RunFinding:
    """How far the policy is from the reference."""
    trend = material.trend(MetricName.KL)
    if trend is None:
        coef = material.config.algorithm.kl.coef
        return unmeasured(f"no reference, or too few steps (algorithm.kl.coef={coef:g})")
    numbers = {"first": trend.first, "last": trend.last}
    measured = (
        f"KL from the reference: {trend.first:.2g} (first quarter) to {trend.last:.2g} nat a token (last quarter)"
    )
    if trend.last >= FAR and not material.is_learning:
        action = "raise algorithm.kl.coef, lower learner.learning_rate; go back to an earlier checkpoint"
        return finding(RunVerdict.WARNING, measured, numbers, action)
    return finding(RunVerdict.NOTICE if trend.last >= FAR else RunVerdict.OK, measured, numbers)


@check("kl_weight", Needs.CONFIG, ("learning_rate", "reward_trend"))
def check_kl_weight(material: Material) -> RunFinding:
    """Whether the KL term leaves room to learn.

    With a loss of -A r + c KL and standardised advantages A of about 1, the best policy differs from the reference by
    A / c nat a token.
    """
    config = material.config.algorithm.kl
    room = 1.0 / config.coef if config.coef > 0 else float("inf")
    numbers = {"coef": config.coef, "kl_last": material.late(MetricName.KL) or 0.0}
    if config.coef == 0:
        return finding(RunVerdict.OK, "algorithm.kl.coef=0: no KL term", numbers)
    measured = (
        f"algorithm.kl.coef={config.coef:g} ({config.place}): an advantage of 1 moves a log-prob by {room:.2g} nat "
        f"at most; measured KL of the late steps {numbers['kl_last']:.2g} nat a token"
    )
    if config.controller == "adaptive" or config.coef < STRONG:
        return finding(RunVerdict.OK, measured, numbers)
    verdict = RunVerdict.FAULT if config.coef >= HOLDS and not material.is_learning else RunVerdict.WARNING
    return finding(verdict, measured, numbers, "lower algorithm.kl.coef; values of 0 to 0.05 are usual")


@check("entropy", Needs.STEPS)
def check_entropy(material: Material) -> RunFinding:
    """Whether the policy still explores."""
    early, late = material.early(MetricName.ENTROPY), material.late(MetricName.ENTROPY)
    if early is None or late is None:
        return unmeasured("no step has an entropy")
    numbers = {"early": early, "late": late}
    measured = f"entropy of the sampled distribution: {early:.3g} early, {late:.3g} nat a token late"
    if late >= LOW or material.is_solved:
        trend = material.trend(MetricName.ENTROPY)
        grows = trend is not None and trend.rises and late > 3 * early and not material.is_learning
        if not grows:
            return finding(RunVerdict.OK, measured, numbers)
        bonus = material.config.algorithm.entropy.bonus
        action = f"the policy becomes random: lower algorithm.entropy.bonus={bonus:g} or learner.learning_rate"
        # A bonus is an intervention; without it the entropy grows for another reason.
        return finding(RunVerdict.WARNING, measured, numbers, action, (), SYMPTOMS if bonus > 0 else ())
    verdict = RunVerdict.FAULT if early < LOW and not material.is_learning else RunVerdict.WARNING
    return finding(verdict, measured, numbers, DIVERSE)


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


@check("logprob_gap", Needs.STEPS, at_once=True)
def check_gap(material: Material) -> RunFinding:
    """Gap of engine and learner by class of token: first, last, template (end of text, tool calls, thinking) and all
    sampled tokens of responses; media, template and text of the probe prompt."""
    found = {name: value for name, metric in CLASSES.items() if (value := material.late(metric)) is not None}
    canary = material.series(MetricName.CANARY)
    if "all" not in found:
        return unmeasured("no trained token was sampled with the weights before its step")
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
    verdict = RunVerdict.WARNING if worst > NEAR * limit or growth else RunVerdict.OK
    return finding(RunVerdict.FAULT if worst > limit else verdict, measured, numbers, action)


@check("engine_weights", Needs.STEPS, ("logprob_gap", *SYMPTOMS), at_once=True)
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
    verdict = RunVerdict.FAULT if faults or worst > limit or pushes < steps else RunVerdict.OK
    return finding(verdict, measured, numbers, action, evidence)


def _limit(material: Material) -> float:
    limits = material.config.supervision.max_logprob_gap
    return limits.float32 if material.config.resources.dtype == "float32" else limits.bfloat16


def _concerns_weights(cause: str) -> bool:
    text = cause.casefold()
    return "canary" in text or "probe prompt" in text or "weights" in text


@check("clipped_tokens", Needs.STEPS)
def check_clipped(material: Material) -> RunFinding:
    """Share of trained tokens whose ratio is clipped."""
    share = material.late(MetricName.CLIP_FRACTION)
    if share is None:
        return unmeasured("no step has a clipped share")
    ratio = max(material.series("ratio_max"), default=1.0)
    numbers = {"clip_fraction": share, "ratio_max": ratio}
    measured = f"{share:.1%} of the late trained tokens are clipped; the largest ratio of the run is {ratio:.3g}"
    action = "lower learner.learning_rate, algorithm.num_minibatches or algorithm.num_epochs"
    return _of_share(share, measured, numbers, action)


@check("over_age_tokens", Needs.STEPS)
def check_over_age(material: Material) -> RunFinding:
    """Share of trained tokens that are older than `algorithm.max_staleness`."""
    tokens = sum(material.series(MetricName.NUM_TOKENS))
    if tokens == 0:
        return unmeasured("no token was trained")
    share = sum(material.series(MetricName.OVER_AGE_TOKENS)) / tokens
    oldest, bound = max(material.series(MetricName.STALENESS_MAX), default=0.0), material.config.algorithm.max_staleness
    numbers = {"over_age_fraction": share, "staleness_max": oldest}
    measured = (
        f"{share:.1%} of the tokens are older than algorithm.max_staleness={bound}; the oldest is {oldest:.0f} versions"
    )
    action = "lower algorithm.max_concurrent_groups, add rollout workers, or use algorithm=decoupled_ppo"
    return _of_share(share, measured, numbers, action)


@check("rejected_groups", Needs.STEPS)
def check_rejected(material: Material) -> RunFinding:
    """Share of finished groups that were not trained."""
    rejected = material.count(CounterName.REJECTED)
    trained, lost = sum(material.series(MetricName.NUM_GROUPS)), float(sum(rejected.values()))
    if trained + lost == 0:
        return unmeasured("no group was finished")
    share = lost / (trained + lost)
    reasons = ", ".join(f"{reason} {num}" for reason, num in sorted(rejected.items(), key=lambda item: -item[1]) if num)
    measured = f"{share:.1%} of {trained + lost:.0f} finished groups were not trained" + (
        f" ({reasons})" if reasons else ""
    )
    action = (
        "the reasons: uniform, see uniform_groups; too_few_scored, see reward_parser; over_age, see over_age_tokens"
    )
    return _of_share(share, measured, {"rejected_fraction": share, "num_rejected": lost}, action)


def _of_share(share: float, measured: str, numbers: dict[str, float], action: str) -> RunFinding:
    return finding(by_share(share, fault=0.6, warning=0.2), measured, numbers, action)


ACTION = "read the end of run.log and the logs of the workers in logs/; `mobula train resume=auto` continues the run"

NO_STEP = (
    "no group was trained: see the reasons, the end of run.log, and rewards.on_failure for responses without a score"
)


@check("finished_steps", Needs.CONFIG)
def check_progress(material: Material) -> RunFinding:
    """Finished steps of the planned ones, and the state in which the run ended."""
    run = material.run
    if run is None:
        return unmeasured("there is no run yet")
    finished, planned = len(run.steps), material.config.num_steps
    status = run.summary.status if run.summary else "not ended"
    numbers = {"finished": float(finished), "planned": float(planned)}
    measured = f"{finished} of {planned} steps are finished; status: {status}"
    if run.summary is None or status == "done" and finished:
        return finding(RunVerdict.OK if finished else RunVerdict.NOTICE, measured, numbers)
    if run.summary.error:
        measured += f"; it ended with {run.summary.error}"
    verdict = RunVerdict.NOTICE if status == "stopped" else RunVerdict.WARNING if finished else RunVerdict.FAULT
    return finding(verdict, measured, numbers, ACTION if finished else NO_STEP, tuple(_reasons(run)))


def _reasons(run: RunFolder) -> list[Evidence]:
    rejected = run.summary.rejected if run.summary else {}
    groups = [Evidence(f"{count} groups were rejected: {reason}") for reason, count in rejected.items()]
    return [*groups, *(Evidence(f"{fault.worker}: {fault.cause}") for fault in run.faults[-NUM_SHOWN:])]


LARGE, HUGE = 0.5, 2.0  # nat a token and step
USUAL_RATE, USUAL_ADAPTER_RATE = 1e-6, 1e-5
SMALL, NONE = 0.05, 0.01  # nat a token over the whole run, if every step moved the same way


@check("learning_rate", Needs.STEPS)
def check_learning_rate(material: Material) -> RunFinding:
    """Change of the policy by an update, against what a run needs.

    A step that changes the log-prob of a trained token by p nat can change it by p * steps over the run at most.
    """
    settled = replace(material, run=material.run and replace(material.run, steps=material.settled))
    changes, rates = settled.series(MetricName.POLICY_CHANGE), settled.series(MetricName.LEARNING_RATE)
    if material.steps and not material.settled:
        return unmeasured(f"every step is of the warm-up (learner.warmup_steps={material.config.learner.warmup_steps})")
    if not changes or not rates:
        return unmeasured("no step has policy_change (records of an earlier version)")
    change, reach = mean(changes), mean(changes) * material.config.num_steps
    weights = material.late(MetricName.WEIGHT_CHANGE) or 0.0
    numbers = {"policy_change": change, "reach": reach, "weight_change": weights, "learning_rate": max(rates)}
    measured = (
        f"an update changes the log-prob of a trained token by {change:.2g} nat and the weights by {weights:.2g} of "
        f"their norm, at a learning rate up to {max(rates):.3g}; {material.config.num_steps} steps reach {reach:.2g} "
        "nat"
    )
    verdict, action = _verdict(material, change, reach, max(rates))
    explains = SYMPTOMS if change >= LARGE else ("reward_trend",)
    return finding(verdict, measured, numbers, action, (), explains)


def _verdict(material: Material, change: float, reach: float, rate: float) -> tuple[RunVerdict, str]:
    key = "learner.learning_rate"
    if change >= LARGE:
        lower = f"lower {key} by a factor of {_power_of_ten(change / 0.05):g}; check learner.max_grad_norm"
        return RunVerdict.FAULT if change >= HUGE and not material.is_learning else RunVerdict.WARNING, lower
    if reach >= SMALL or material.is_solved:
        return RunVerdict.OK, ""
    usual = USUAL_ADAPTER_RATE if material.config.policy.lora.is_on else USUAL_RATE
    why = "why the gradient is small: uniform groups, policy.freeze, algorithm.kl.coef"
    factor = min(_power_of_ten(1.0 / max(reach, 1e-9)), _power_of_ten(usual / rate))
    higher = f"check {why}; {key}={rate:.3g} is a usual rate, so raise it by a factor of 3 at most, or num_steps"
    if rate < usual:
        higher = f"raise {key} by a factor of {factor:g} (usual are about {usual:g}), or check {why}"
    return RunVerdict.FAULT if reach < NONE and not material.is_learning else RunVerdict.WARNING, higher


MAX_DECAY = 0.2  # share of the weights, over the recorded steps


@check("weight_decay", Needs.STEPS)
def check_weight_decay(material: Material) -> RunFinding:
    """Share of the weights that decay alone removes: each step multiplies them by 1 - learning rate * decay."""
    coef, rates = material.config.learner.weight_decay, material.series(MetricName.LEARNING_RATE)
    if not rates:
        return unmeasured("no step has a learning rate")
    algorithm = material.config.algorithm
    lost = 1 - math.exp(-coef * sum(rates) * algorithm.num_epochs * algorithm.num_minibatches)
    measured = f"learner.weight_decay={coef:g} alone shrinks the weights by {lost:.2%} in {len(rates)} steps"
    action = "lower learner.weight_decay: 0 to 0.1 is usual"
    verdict = RunVerdict.WARNING if lost >= MAX_DECAY else RunVerdict.OK
    return finding(verdict, measured, {"lost": lost, "weight_decay": coef}, action, (), SYMPTOMS)


def _power_of_ten(ratio: float) -> float:
    return float(10 ** max(1, round(math.log10(ratio))))


@check("skipped_steps", Needs.STEPS)
def check_skipped_steps(material: Material) -> RunFinding:
    """Share of optimizer steps that were left out, and of steps without a gradient."""
    norms = [step.values[MetricName.GRAD_NORM] for step in material.steps if MetricName.GRAD_NORM in step.values]
    skipped = sum(material.series("skipped"))
    planned = skipped + sum(material.series(MetricName.OPTIMIZER_STEPS))
    if not norms or planned == 0:
        return unmeasured("no step has a gradient norm")
    share, zero = skipped / planned, sum(norm == 0 for norm in norms) / len(norms)
    finite = sorted(norm for norm in norms if math.isfinite(norm))
    middle = finite[len(finite) // 2] if finite else math.nan
    numbers = {"skipped_fraction": share, "zero_gradient_fraction": zero, "grad_norm": middle}
    measured = (
        f"{share:.1%} of {planned:.0f} optimizer steps were left out (gradient not finite); the gradient is 0 in "
        f"{zero:.1%} of the steps, its median norm {middle:.3g}"
    )
    action = (
        "lower learner.learning_rate, check learner.max_grad_norm and the reward for huge values"
        if share >= zero
        else "no token has an advantage: see uniform_groups, policy.freeze, algorithm.advantage, weights of the loss"
    )
    return finding(by_share(max(share, zero), fault=0.5, warning=0.1), measured, numbers, action)
