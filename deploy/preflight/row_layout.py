"""Row layout: decides whether rows are computed without padding, and a prompt once for all of its responses."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from mobula.actors.processors.teacher import named_teachers
from mobula.configs.schema import RunConfig
from mobula.learner.policies.families import family_at, model_type_at
from mobula.learner.policies.families.base import Family

_logger = logging.getLogger(__name__)


def with_row_layout(config: RunConfig) -> RunConfig:
    """Returns the config as `decided` for the checkpoints of policy and teachers; logs the reasons.

    Raises:
        ValueError: a checkpoint is of a family that cannot be computed here.
    """
    if config.sampler.is_flow:  # its rows have no tokens
        return _with(config, packing=config.learner.packing is True)
    sources = {"policy.model": config.policy.model, **named_teachers(config)}
    families = {
        f"a {model_type_at(source)} ({key}={source})": family_at(source, key) for key, source in sources.items()
    }
    config, reasons = decided(config, families)
    for key, reason in reasons.items():
        _logger.info("%s is off: %s", key, reason)
    return config


def decided(config: RunConfig, families: Mapping[str, Family]) -> tuple[RunConfig, dict[str, str]]:
    """Returns the config with `learner.packing=auto` decided, and without `learner.share_prompts` where shared prompts
    would change results; also returns the reason of each key that is off.

    Args: families: of the policy, then of its teachers, by the name of each in a reason.
    """
    reasons = {}
    if reason := _padded_because(config, families):
        reasons["learner.packing"] = reason
    config = _with(config, packing=config.learner.packing is not False and not reason)
    name, policy = next(iter(families.items()))
    if reason := _unshared_because(config, policy, name):
        reasons["learner.share_prompts"] = reason
        config = _with(config, share_prompts=False)
    return config, reasons


def _padded_because(config: RunConfig, families: Mapping[str, Family]) -> str:
    """Returns why `learner.packing=auto` computes padded rows; empty if it packs them, or the key is true or false."""
    if config.learner.packing != "auto":
        return ""
    if config.sampler.draws_tokens:
        return "sampler=image_tokens computes padded rows"
    if config.policy.attention == "eager":
        return "policy.attention=eager does not keep packed rows apart"
    return next((f"{name}: {family.padded_because}" for name, family in families.items() if family.padded_because), "")


def _unshared_because(config: RunConfig, policy: Family, name: str) -> str:
    """Returns why prompts are not shared; empty if they are, or no key asks for it."""
    if not config.learner.shares_prompts:
        return ""
    if config.sampler.draws_tokens:
        return "sampler=image_tokens computes padded rows"
    if config.policy.attention != "sdpa":
        return f"policy.attention={config.policy.attention} attends within rows alone"
    if config.policy.dropout:
        return "policy.dropout=true is drawn for each response"
    return "" if policy.shares_prefixes else f"{name} has no family file that says it can"


def _with(config: RunConfig, **values: Any) -> RunConfig:
    return config.model_copy(update={"learner": config.learner.model_copy(update=values)})
