"""Rules of a run and of its guard."""

from __future__ import annotations

from urllib.parse import urlsplit

from mobula.configs.rules.row import Rule, RuleRow
from mobula.configs.schema.run import LATEST, RunConfig


def guard_signs(config: RunConfig) -> list[str]:
    """The signs that are on and have an action."""
    if config.offline.is_on:
        return []
    limits = [name for name, limit in dict(config.guard.limits).items() if limit > 0]
    judge = ["judge"] if config.rewards.judge_weights else []
    return [sign for sign in (*judge, *limits) if config.guard.action_of(sign) != "none"]


def _raises_a_coefficient(config: RunConfig) -> str | None:
    kl, signs = config.algorithm.kl, [s for s in guard_signs(config) if config.guard.action_of(s) == "raise_kl"]
    if not signs or (kl.coef > 0 and kl.controller == "fixed"):
        return None
    return (
        f"guard raises the KL coefficient for {', '.join(signs)}, but algorithm.kl.coef={kl.coef:g} and "
        f"algorithm.kl.controller={kl.controller}: set a coefficient above 0 with controller=fixed, e.g. "
        "algorithm.kl.coef=0.01, or another guard.action"
    )


def _rolls_back_to_a_checkpoint(config: RunConfig) -> str | None:
    signs = [s for s in guard_signs(config) if config.guard.action_of(s) == "rollback"]
    if not signs or config.checkpoints.interval_steps > 0:
        return None
    return (
        f"guard rolls back for {', '.join(signs)}, but checkpoints.interval_steps=0 leaves version 0 alone: set "
        "checkpoints.interval_steps, e.g. 10, or another guard.action"
    )


GUARD_RULES: tuple[Rule, ...] = (
    _raises_a_coefficient,
    _rolls_back_to_a_checkpoint,
    RuleRow(
        lambda c: c.guard.limits.length != 0 and c.guard.limits.length <= 1,
        "guard.limits.length={guard.limits.length:g} is a ratio of lengths: set it above 1, e.g. 2, or to 0 for no "
        "limit",
    ),
    RuleRow(
        lambda c: c.rewards.judged_interval == 0 and c.evaluation.interval_steps <= 0 and "judge" in guard_signs(c),
        "rewards.judged_interval=0 judges held-out prompts alone, but evaluation.interval_steps=0 evaluates before and "
        "after RL only: set evaluation.interval_steps, or rewards.judged_interval=1",
    ),
    RuleRow(
        lambda c: (
            c.guard.limits.format != 0 and all(component.function != "format" for component in c.rewards.components)
        ),
        "guard.limits.format={guard.limits.format:g}, but no component has the function format: add one to "
        "rewards.components (weight 0 measures it), or set guard.limits.format=0",
    ),
)


def _an_address_is_of_one_tracker(config: RunConfig) -> str | None:
    metrics = config.metrics
    if not metrics.tracker_address or len(metrics.trackers) == 1:
        return None
    return (
        f"metrics.tracker_address={metrics.tracker_address} is the server of one tracker, and metrics.trackers="
        f"{list(metrics.trackers)}: name one, or leave the address empty"
    )


def _no_address_holds_credentials(config: RunConfig) -> str | None:
    addresses = {"metrics.tracker_address": config.metrics.tracker_address, "tracing.address": config.tracing.address}
    for key, value in addresses.items():
        address = urlsplit(value)
        if "@" in address.netloc:
            return (
                f"{key} has credentials for {address.hostname}, and the configuration is written to the run folder: "
                "give the address alone, and the key in the environment variable of the tracker or exporter"
            )
    return None


def _traced_steps_are_made(config: RunConfig) -> str | None:
    named = {"chrome_steps": config.tracing.chrome_steps, "profile_steps": config.tracing.profile_steps}
    for key, steps in named.items():
        if any(not 1 <= step <= config.num_steps for step in steps):
            return f"tracing.{key}={list(steps)} has steps that are not between 1 and num_steps={config.num_steps}"
    return None


def _a_push_ends_before_its_engines_count_as_hung(config: RunConfig) -> str | None:
    """A push pauses engines while they wait for a hung engine; a shorter timeout would replace healthy engines too."""
    push, longest = config.weight_sync.timeout_s, config.weight_sync.answer_s
    limits = {
        "supervision.probe_timeout_s": config.supervision.probe_timeout_s,
        "timeouts.rollout_s": config.timeouts.rollout_s,
    }
    short = {key: limit for key, limit in limits.items() if limit <= longest}
    if not short:
        return None
    return (
        f"weight_sync.timeout_s={push:g} lets a push pause an engine for up to {longest:g} s, a quarter more, and "
        f"{' and '.join(f'{key}={limit:g}' for key, limit in short.items())} would replace healthy engines before: "
        f"raise {' and '.join(short)} above {longest:g}, or lower weight_sync.timeout_s below "
        f"{min(short.values()) / longest * push:g}"
    )


def _suites_have_names(config: RunConfig) -> str | None:
    unfit = [name for name in config.evaluation.suites if name == "held_out" or not name.replace("_", "").isalnum()]
    if not unfit:
        return None
    return (
        f"evaluation.suites has the name {unfit[0]!r}: use letters, digits and underscores, and another name than "
        "held_out, which is the run's own suite"
    )


def _greedy_suites_have_one_sample(config: RunConfig) -> str | None:
    if config.sampler.denoises:  # each response begins at other noise
        return None
    if config.evaluation.temperature == 0 and config.evaluation.num_samples > 1:
        return (
            f"evaluation.num_samples={config.evaluation.num_samples} at evaluation.temperature=0, whose responses are "
            "all the same: set evaluation.num_samples=1, or a temperature above 0"
        )
    for name, suite in config.evaluation.suites.items():
        if suite.temperature == 0 and suite.num_samples > 1:
            return (
                f"evaluation.suites.{name} has num_samples={suite.num_samples} at temperature 0, whose responses are "
                "all the same: set num_samples=1, or a temperature above 0"
            )
    return None


RUN_RULES: tuple[Rule, ...] = (
    RuleRow(
        lambda c: c.name == LATEST,
        "name={name} is the link to the newest run in {folder}: give another name",
    ),
    _an_address_is_of_one_tracker,
    _no_address_holds_credentials,
    RuleRow(
        lambda c: (c.tracing.exporter == "otlp") != bool(c.tracing.address),
        "tracing.exporter={tracing.exporter} and tracing.address={tracing.address!r}: exporter=otlp sends to an "
        "address, and the others have none; set both, or neither",
    ),
    _traced_steps_are_made,
    RuleRow(
        lambda c: c.supervision.backoff_s > c.supervision.max_backoff_s,
        "supervision.backoff_s={supervision.backoff_s:g} is the pause before a first restart, "
        "supervision.max_backoff_s={supervision.max_backoff_s:g} the longest one: lower the one or raise the other",
    ),
    _a_push_ends_before_its_engines_count_as_hung,
    RuleRow(
        lambda c: c.weight_sync.payload == "adapters" and not c.policy.lora.is_on,
        "weight_sync.payload=adapters but policy.lora.rank={policy.lora.rank}, so there are none: set "
        "policy.lora.rank to 8 or more, or weight_sync.payload=weights",
    ),
    RuleRow(
        lambda c: c.policy.dropout and not c.offline.is_on and c.supervision.on_logprob_gap != "warn",
        "policy.dropout=true makes the learner's log-probs other ones than were sampled, and "
        "supervision.on_logprob_gap=stop ends a run for that: set policy.dropout=false, or "
        "supervision.on_logprob_gap=warn",
    ),
    _suites_have_names,
    _greedy_suites_have_one_sample,
)
