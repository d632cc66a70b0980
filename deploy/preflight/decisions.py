"""Decisions: replaces the values of a configuration that decide themselves, before anything reads them.

The run folder, the journal, the audit and a resume have the configuration as decided: absolute paths,
`data.prompt_suffix=auto`, `learner.packing=auto` and `learner.share_prompts`. Other values named `auto` (`resume`,
`resources.address`, `resources.*.strategy`) are read as they are.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mobula.actors.processors.teacher import named_teachers
from mobula.cluster.replay.run_identity import PATHS
from mobula.cluster.user_code import is_user_code, user_files
from mobula.configs.schema import RunConfig
from mobula.learner.policies.families import family_at, model_type_at
from mobula.learner.policies.families.base import Family

_logger = logging.getLogger(__name__)

WRITTEN = ("folder", "data.cache_path")  # paths that may not exist yet
NO_FOLDER = ("environment", "huggingface")  # kinds of data whose `data.path` is no path, or may be a name of the hub
SOURCE = re.compile(r"data\.mixture\.sources\.[^.]+\.path")


def with_decisions(config: RunConfig) -> RunConfig:
    """Returns the config with all decisions. Raises: ValueError: as `with_row_layout`."""
    config = with_absolute_paths(config)
    data = config.data.model_copy(update={"prompt_suffix": config.question_suffix})
    return with_row_layout(config.model_copy(update={"data": data}))


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Returns the config with paths from the working directory of the command: of a resume it may be another. Hub names
    stay, and so do options of user code."""
    written = [*WRITTEN, *(["policy.model"] if config.policy.tiny != "none" else [])]
    if config.data.kind not in NO_FOLDER and not is_user_code(config.data.kind):
        written.append("data.path")

    def absolute(value: Any, key: str) -> Any:
        if isinstance(value, Mapping):
            return {name: absolute(item, f"{key}.{name}".removeprefix(".")) for name, item in value.items()}
        if isinstance(value, list):
            return [absolute(item, key) for item in value]
        if isinstance(value, str) and value:
            has_path = key.startswith(PATHS) and not (key == "data.path" and config.data.kind == "environment")
            is_path = has_path or SOURCE.fullmatch(key)
            if key in written or (is_path and Path(value).exists()):
                return str(Path(value).absolute())
            if any(Path(file).is_file() for file in user_files(value)):
                return str(Path(value).absolute())
        return value

    return RunConfig.model_validate_json(json.dumps(absolute(config.model_dump(mode="json"), "")), strict=True)


def with_row_layout(config: RunConfig) -> RunConfig:
    """Returns the config as `decided` for the checkpoints of policy and teachers; logs the reasons."""
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
        return f"sampler={config.sampler.kind} computes padded rows"
    if config.policy.attention == "eager":
        return "policy.attention=eager does not keep packed rows apart"
    return next((f"{name}: {family.padded_because}" for name, family in families.items() if family.padded_because), "")


def _unshared_because(config: RunConfig, policy: Family, name: str) -> str:
    if not config.learner.shares_prompts:
        return ""
    if config.sampler.draws_tokens:
        return f"sampler={config.sampler.kind} computes padded rows"
    if config.policy.attention != "sdpa":
        return f"policy.attention={config.policy.attention} attends within rows alone"
    if config.policy.dropout:
        return "policy.dropout=true is drawn for each response"
    return "" if policy.shares_prefixes else f"{name} has no family file that says it can"


def _with(config: RunConfig, **values: Any) -> RunConfig:
    return config.model_copy(update={"learner": config.learner.model_copy(update=values)})
