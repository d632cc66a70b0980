"""Composes a RunConfig from groups and `key=value` overrides; writes and reads the config file of a run.

    config = load_config(["experiment=sums", "resources=laptop", "algorithm.kl.coef=0.01"])
    path.write_text(dump_config(config))
    assert load_resolved(path) == config

The order of overrides does not matter. From weak to strong: the schema's defaults, the groups, the experiment, the
groups on the command line (`configs/overrides.py`), the keys on the command line. Kind sections that are not selected
(`sampler.vllm` with `sampler=huggingface`) are dropped from options, and refused on the command line and in a file. An
override without effect is refused. Errors are a ConfigError that names the key, the value got and the next action.
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

from mobula.configs.errors import ConfigError
from mobula.configs.overrides import (
    COMPUTATIONS,
    COMPUTED_FROM,
    EXPERIMENT,
    FOLDER,
    SMALL_EXAMPLE,
    Override,
    apply_overrides,
    find,
    known_keys,
    layers,
    merge,
    own_values,
    read_overrides,
    refuse_overruled,
    refuse_unread,
    roots,
    unknown,
    without_missing,
)
from mobula.configs.rules import checked
from mobula.configs.rules.data import reward_contradictions
from mobula.configs.schema.base import defaults, unread, without_unread
from mobula.configs.schema.rewards import RewardsConfig
from mobula.configs.schema.run import RunConfig

OF_UNION = re.compile(r"(literal|str-enum)\[|constrained-str$")
"""Part of an error's location: the member of `Literal | UserCode` that refused the value; each member has an error."""
REPRODUCE = "reproduce"
RUNS = Path("runs")
CONFIG_FILE = "config.yaml"  # of a run folder
NAMED_BY_USER = (("policy", "model"), ("data", "path"))
for _name, _computation in COMPUTATIONS.items():
    OmegaConf.register_new_resolver(_name, _computation, replace=True)
NAME_BOTH = (
    "`experiment=own policy.model=CHECKPOINT data.path=FOLDER` trains a checkpoint on your own data; "
    f"`experiment={SMALL_EXAMPLE}` trains a small model on images that it writes itself"
)


def load_config(overrides: Sequence[str], *, is_complete: bool = True) -> RunConfig:
    """Composes the YAML groups with `overrides` and validates the result. `reproduce=RUN` takes the configuration of a
    run in place of groups.

    Without `is_complete`, values without a default (`policy.model`, `data.path`) may be missing and are `???`.

    Raises:
        ConfigError: an unknown key or group option, a missing or ill-typed value, contradicting sections, or an
            override without effect.
    """
    parsed = read_overrides(overrides)
    if any(override.name == REPRODUCE for override in parsed):
        return _reproduced(parsed)
    values = _composed(parsed)
    apply_overrides(values, parsed)
    refuse_unread(values, parsed)
    values = without_unread(RunConfig, values)
    config = _validated(without_missing(values) if is_complete else values)
    refuse_overruled(values, parsed)
    return config


def _composed(parsed: Sequence[Override]) -> dict[str, Any]:
    """Merges the schema's defaults, the groups, the experiment and the chosen options, in this order."""
    # Values that a file computes from another key (`${times:...}`, `${if_positive:...}`, `${if_gpu:...}`) are computed
    # from overrides of that key.
    choices = [override for override in parsed if override.is_group]
    with initialize_config_dir(str(FOLDER), version_base="1.3"):
        # In single quotes, Hydra's grammar takes any other character.
        others = ["'file://" + str(root).replace("'", r"\'") + "'" for root in roots()[1:]]
        search = f"hydra.searchpath=[{','.join(others)}]"
        composed = compose("config", [search, *(f"{choice.name}={choice.value}" for choice in choices)])
    values = merge(defaults(RunConfig), OmegaConf.to_container(composed, resolve=False))  # type: ignore[arg-type]
    chosen = {choice.name: choice.value for choice in choices if choice.name != EXPERIMENT}
    for group in layers():
        if group in chosen:
            merge(values, own_values(group, chosen[group]))
    apply_overrides(
        values, [override for override in parsed if isinstance(override.value, COMPUTED_FROM.get(override.name, ()))]
    )
    return resolved(values)


def resolved(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values with each `${...}` computed."""
    return OmegaConf.to_container(OmegaConf.create(values), resolve=True)  # type: ignore[return-value]


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML for `load_resolved`, without kind sections that are not selected."""
    return yaml.safe_dump(without_unread(RunConfig, config.model_dump(mode="json")), sort_keys=False)


def load_resolved(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a file of `dump_config` and applies overrides of single keys.

    Raises:
        ConfigError: the file is missing, no YAML mapping, or does not fit the schema of this version; or an override is
            unfit, or chooses a group.
    """
    values = _read_mapping(path, "give the config file of a run", "restore it or start a new run")
    for section, key, chosen in unread(RunConfig, values):
        raise ConfigError(f"{path}: {section} is not read with {key}={chosen}: leave the section out, or change {key}")
    parsed = read_overrides(overrides)
    for override in parsed:
        if override.is_group:
            raise ConfigError(
                f"{override.text!r} chooses a group, and this run has chosen: set single keys, as "
                f"{override.name}.KEY=VALUE"
            )
    apply_overrides(values, parsed)
    refuse_unread(values, parsed)
    config = _validated(without_missing(without_unread(RunConfig, values)))
    refuse_overruled(values, parsed)
    return config


def _reproduced(parsed: Sequence[Override]) -> RunConfig:
    """Returns the configuration of the run that `reproduce` names, with the other overrides, for a new run."""
    named = str(next(override.value for override in parsed if override.name == REPRODUCE))
    folder = next((path for path in (Path(named), RUNS / named) if (path / CONFIG_FILE).is_file()), None)
    if folder is None:
        raise ConfigError(
            f"{REPRODUCE}={named}: there is no {CONFIG_FILE} in {named} or {RUNS / named}: give the run's folder, or "
            f"its name below {RUNS}"
        )
    folder = folder.resolve()
    own = {"name": f"{folder.name}-again", "resume": "never"}
    texts = {override.name: override.text for override in parsed} | {REPRODUCE: f"{REPRODUCE}={folder}"}
    return load_resolved(
        folder / CONFIG_FILE, [*(f"{key}={value}" for key, value in own.items() if key not in texts), *texts.values()]
    )


def load_rewards(path: Path) -> RewardsConfig:
    """Reads a file with the section `rewards` of a configuration. Missing keys have the schema's defaults.

    Raises:
        ConfigError: the file is missing, no YAML mapping, does not fit the schema, or has contradicting parts.
    """
    values = _read_mapping(path, "give a YAML file with reward components", "write components: [...] into it")
    try:
        rewards = RewardsConfig.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        raise ConfigError("\n".join(_sentence(d, "rewards.") for d in error.errors())) from error
    if contradictions := reward_contradictions(rewards):
        raise ConfigError("\n".join(contradictions))
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
    """Validates strictly: "1" and true are no numbers. JSON mode reads lists, paths and enums from YAML types."""
    try:
        config = RunConfig.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        errors = error.errors()
        is_unnamed = any(d["type"] == "missing" and d["loc"] in NAMED_BY_USER for d in errors)
        hint = [NAME_BOTH] if is_unnamed else []
        raise ConfigError("\n".join([*dict.fromkeys(map(_sentence, errors)), *hint])) from error
    return checked(config)


def _sentence(detail: ErrorDetails, prefix: str = "") -> str:
    name = prefix + ".".join(str(part) for part in detail["loc"] if not OF_UNION.match(str(part)))
    key = find(name)
    if key is None:
        return unknown(name, list(known_keys()))
    if detail["type"] == "missing":
        return f"{name} is missing, expected {key.expected}: give {name}=VALUE"
    expected = key.expected_near(str(detail["input"]))
    return f"{name} got {_shown(detail['input'])}, expected {expected}: set {name}=VALUE"


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)
