"""From groups and `key=value` overrides to a RunConfig, and from a RunConfig to the file beside the run.

    config = load_config(["experiment=sums", "resources=laptop", "algorithm.kl.coef=0.01"])
    path.write_text(dump_config(config))
    assert load_resolved(path) == config

What is named on the command line wins, in whatever order the words stand. From weak to strong: the schema's defaults,
the groups, what the experiment sets, what the groups on the command line say themselves (`configs/groups.py`), the keys
on the command line. A section of another kind than the chosen one (`sampler.vllm` with `sampler=huggingface`) is
dropped where options set it, and refused on the command line and in a file.
A word that does not stand in the result is refused. Whatever is wrong with the words is one ConfigError whose message
names the key, the value got and the next action.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mobula.configs import keys
from mobula.configs.errors import ConfigError
from mobula.configs.groups import (
    COMPUTATIONS,
    COMPUTED_FROM,
    EXPERIMENT,
    FOLDER,
    SMALL_EXAMPLE,
    layers,
    merge,
    own_values,
    roots,
    without_missing,
)
from mobula.configs.rules import checked
from mobula.configs.rules.rewards import reward_contradictions
from mobula.configs.schema.base import defaults, unread, without_unread
from mobula.configs.schema.rewards import RewardsConfig
from mobula.configs.schema.run import RunConfig
from mobula.configs.words import Word, lay_on, read_words, refuse_overruled, refuse_unread, unknown

OF_UNION = re.compile(r"(literal|str-enum)\[|constrained-str$")
"""In the place of an error: the member of `Literal | UserCode` that refused the value; each member has an error."""
NAMED_BY_USER = (("policy", "model"), ("data", "path"))
for _name, _computation in COMPUTATIONS.items():
    OmegaConf.register_new_resolver(_name, _computation, replace=True)
NAME_BOTH = (
    "`experiment=own policy.model=CHECKPOINT data.path=FOLDER` trains a checkpoint on your own data; "
    f"`experiment={SMALL_EXAMPLE}` trains a small model on images that it writes itself"
)


def load_config(overrides: Sequence[str], *, is_complete: bool = True) -> RunConfig:
    """Compose the YAML groups with `overrides` and validate the result.

    Without `is_complete`, a value that is left to the user (`policy.model`, `data.path`) may be missing and is `???`.

    Raises:
        ConfigError: an unknown key or group option, a missing or ill-typed value, sections that contradict, or a word
            that does not stand in the result.
    """
    words = read_words(overrides)
    values = _composed(words)
    lay_on(values, words)
    refuse_unread(values, words)
    values = without_unread(RunConfig, values)
    config = _validated(without_missing(values) if is_complete else values)
    refuse_overruled(values, words)
    return config


def _composed(words: Sequence[Word]) -> dict[str, Any]:
    """The schema's defaults, the groups and the experiment on top of them, and on top what the chosen options say.

    Numbers that a file computes from another key (`${times:...}`, `${if_positive:...}`, `${if_gpu:...}`) are computed
    from what a word says of that key.
    """
    choices = [word for word in words if word.is_group]
    with initialize_config_dir(str(FOLDER), version_base="1.3"):
        # Single quotes, in which Hydra's grammar takes any character but them.
        others = ["'file://" + str(root).replace("'", r"\'") + "'" for root in roots()[1:]]
        search = f"hydra.searchpath=[{','.join(others)}]"
        composed = compose("config", [search, *(f"{choice.name}={choice.value}" for choice in choices)])
    values = merge(defaults(RunConfig), OmegaConf.to_container(composed, resolve=False))  # type: ignore[arg-type]
    chosen = {choice.name: choice.value for choice in choices if choice.name != EXPERIMENT}
    for group in layers():
        if group in chosen:
            merge(values, own_values(group, chosen[group]))
    lay_on(values, [word for word in words if isinstance(word.value, COMPUTED_FROM.get(word.name, ()))])
    return resolved(values)


def resolved(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values with each `${...}` computed."""
    return OmegaConf.to_container(OmegaConf.create(values), resolve=True)  # type: ignore[return-value]


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML, without sections of other kinds; `load_resolved` reads it back equal."""
    return yaml.safe_dump(without_unread(RunConfig, config.model_dump(mode="json")), sort_keys=False)


def load_resolved(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a file that `dump_config` wrote, with single keys set on top of it.

    Raises:
        ConfigError: the file is missing, no YAML mapping, or does not fit the schema of this version; or an override is
            unfit, or chooses a group.
    """
    values = _read_mapping(path, "give the config file of a run", "restore it or start a new run")
    for section, key, chosen in unread(RunConfig, values):
        raise ConfigError(f"{path}: {section} is not read with {key}={chosen}: leave the section out, or change {key}")
    words = read_words(overrides)
    for word in words:
        if word.is_group:
            raise ConfigError(
                f"{word.text!r} chooses a group, and this run has chosen: set single keys, as {word.name}.KEY=VALUE"
            )
    lay_on(values, words)
    refuse_unread(values, words)
    config = _validated(without_missing(without_unread(RunConfig, values)))
    refuse_overruled(values, words)
    return config


def load_rewards(path: Path) -> RewardsConfig:
    """Read a file that holds what stands under `rewards` in a run's configuration: components, recipes and the rest.

    Keys that the file leaves out have the schema's defaults.

    Raises:
        ConfigError: the file is missing, no YAML mapping, or does not fit the schema; or its parts contradict.
    """
    values = _read_mapping(path, "give a YAML file with reward components", "write components: [...] into it")
    try:
        rewards = RewardsConfig.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        raise ConfigError("\n".join(_sentence(d, "rewards.") for d in error.errors())) from error
    found = reward_contradictions(rewards)
    if found:
        raise ConfigError("\n".join(found))
    return rewards


def _read_mapping(path: Path, give: str, fix: str) -> dict[Any, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): {give}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is no YAML ({reason}): {fix}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds {_shown(values)}, expected a mapping: {fix}")
    return values


def _validated(values: Mapping[Any, Any]) -> RunConfig:
    """Strict validation: a text is no number and true is no 1. JSON keeps lists, paths and enums writable in YAML."""
    try:
        config = RunConfig.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        found = error.errors()
        is_unnamed = any(d["type"] == "missing" and d["loc"] in NAMED_BY_USER for d in found)
        hint = [NAME_BOTH] if is_unnamed else []
        raise ConfigError("\n".join([*dict.fromkeys(map(_sentence, found)), *hint])) from error
    return checked(config)


def _sentence(detail: ErrorDetails, prefix: str = "") -> str:
    """One validation error in the user's words; `prefix` is where in a run's configuration the part stands."""
    name = prefix + ".".join(str(part) for part in detail["loc"] if not OF_UNION.match(str(part)))
    key = keys.find(name)
    if key is None:
        return unknown(name, list(keys.known_keys()))
    if detail["type"] == "missing":
        return f"{name} is missing, expected {key.expected}: give {name}=VALUE"
    return f"{name} got {_shown(detail['input'])}, expected {key.expected}: set {name}=VALUE"


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)
