"""Rules of the guard against reward hacking."""

from __future__ import annotations

from mobula.configs.schema.run import RunConfig


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


def _length_is_a_ratio(config: RunConfig) -> str | None:
    limit = config.guard.limits.length
    if limit == 0 or limit > 1:
        return None
    return f"guard.limits.length={limit:g} is a ratio of lengths: set it above 1, e.g. 2, or to 0 for no limit"


def _held_out_judge_is_evaluated(config: RunConfig) -> str | None:
    is_held_out = config.rewards.judge_weights and config.rewards.judged_interval == 0
    if not is_held_out or config.evaluation.interval_steps > 0 or "judge" not in guard_signs(config):
        return None
    return (
        "rewards.judged_interval=0 judges held-out prompts alone, but evaluation.interval_steps=0 evaluates before and "
        "after RL only: set evaluation.interval_steps, or rewards.judged_interval=1"
    )


def _format_has_a_component(config: RunConfig) -> str | None:
    has_format = any(component.function == "format" for component in config.rewards.components)
    if config.guard.limits.format == 0 or has_format:
        return None
    return (
        f"guard.limits.format={config.guard.limits.format:g}, but no component has the function format: add one to "
        "rewards.components (weight 0 measures it), or set guard.limits.format=0"
    )


RULES = (
    _raises_a_coefficient,
    _rolls_back_to_a_checkpoint,
    _length_is_a_ratio,
    _held_out_judge_is_evaluated,
    _format_has_a_component,
)
