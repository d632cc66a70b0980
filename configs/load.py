"""From groups and `key=value` overrides to a RunConfig, and from a RunConfig to the file beside the run.

    config = load_config(["experiment=digits", "resources=laptop", "algorithm.kl.coef=0.01"])
    path.write_text(dump_config(config))
    assert load_resolved(path) == config

Overrides may stand in any order: groups are chosen first, single keys are set on top. Whatever is wrong with them is
one ConfigError whose message names the key, the value got and the next action.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from configs import keys
from configs.errors import ConfigError
from configs.schema.rewards import RewardsConfig, reward_contradictions
from configs.schema.run import RunConfig

FOLDER = Path(__file__).parent
MISSING = "???"


def load_config(overrides: Sequence[str]) -> RunConfig:
    """Compose the YAML groups with `overrides` and validate the result.

    Raises:
        ConfigError: an unknown key or group option, a missing or ill-typed value, or sections that contradict.
    """
    changes = [_checked(text) for text in overrides]
    try:
        with initialize_config_dir(str(FOLDER), version_base="1.3"):
            composed = compose("config", changes)
        values = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise ConfigError(
            f"{' '.join(overrides)}: a value cannot be set there ({reason}); `mobula show-config` shows what is there"
        ) from error
    return _validated(_without_missing(values))


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML; `load_resolved` reads it back equal."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def load_resolved(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a file that `dump_config` wrote, with single keys set on top of it.

    Raises:
        ConfigError: the file is missing, no YAML mapping, or does not fit the schema of this version; or an override is
            unfit, or chooses a group.
    """
    values = _read_mapping(path, "give the config file of a run", "restore it or start a new run")
    return _validated(_changed(values, overrides))


def load_rewards(path: Path) -> RewardsConfig:
    """Read a file that holds what stands under `rewards` in a run's configuration: components, recipes and the rest.

    Keys that the file leaves out are those of the `rewards` group's base.

    Raises:
        ConfigError: the file is missing, no YAML mapping, or does not fit the schema; or its parts contradict.
    """
    values = _read_mapping(path, "give a YAML file with reward components", "write components: [...] into it")
    shared = yaml.safe_load((FOLDER / "rewards" / "_base.yaml").read_text(encoding="utf-8"))
    try:
        rewards = RewardsConfig.model_validate_json(json.dumps({**shared, **values}), strict=True)
    except ValidationError as error:
        raise ConfigError("\n".join(_sentence(d, "rewards.") for d in error.errors())) from error
    found = reward_contradictions(rewards)
    if found:
        raise ConfigError("\n".join(found))
    return rewards


def _read_mapping(path: Path, give: str, mend: str) -> dict[Any, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): {give}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is no YAML ({reason}): {mend}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds {_shown(values)}, expected a mapping: {mend}")
    return values


def groups() -> dict[str, tuple[str, ...]]:
    """The options of every group, by the group's name; a file named `_...` is shared by options and is none itself."""
    folders = sorted(folder for folder in FOLDER.iterdir() if any(folder.glob("*.yaml")))
    return {folder.name: _options(folder) for folder in folders}


def _options(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in folder.glob("*.yaml") if not path.stem.startswith("_")))


def _changed(values: Mapping[Any, Any], overrides: Sequence[str]) -> Any:
    """`values` with single keys set to what `overrides` say."""
    if not overrides:
        return values
    changed = OmegaConf.create(dict(values))
    for text in overrides:
        _checked(text)
        override = _parsed(text)
        name = override.key_or_group
        if name in groups():
            raise ConfigError(
                f"{text!r} chooses a group, and this run has chosen: set single keys, as {name}.KEY=VALUE"
            )
        try:
            OmegaConf.update(changed, name, override.value(), force_add=True)
        except (OmegaConfBaseException, IndexError, ValueError) as error:
            raise ConfigError(f"{text}: a value cannot be set there ({error})") from error
    return OmegaConf.to_container(changed)


def _checked(text: str) -> str:
    """One override as Hydra takes it, its key or option known to exist."""
    override = _parsed(text)
    name = override.key_or_group
    if override.package is not None or override.is_delete():
        raise ConfigError(f"{text!r} is not understood: every key keeps its place, so write {name}=VALUE")
    if override.is_sweep_override():
        raise ConfigError(f"{text!r} holds several values but a run takes one: {_one_value(name, text)}")
    options = groups()
    if name in options:
        return _chosen(name, override.value(), options[name])
    if keys.find(name) is None:
        raise ConfigError(_unknown(name, [*keys.known_keys(), "experiment"]))
    return "++" + text.lstrip("+")


def _parsed(text: str) -> Override:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ConfigError(f"{text!r} is no override: write {key.lstrip('~+-') or 'KEY'}=VALUE")
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        bare = key.lstrip("~+-")
        if bare.strip(" .") != bare:
            hint = f"write {bare.strip(' .') or 'KEY'}={value.strip()}"
        else:
            hint = "write $HOME for ~" if value.startswith("~") else _one_value(bare, text)
        raise ConfigError(f"{text!r} is no override that can be read: {hint}") from error


def _one_value(name: str, text: str) -> str:
    """How to write what `text` says as the one value that `name` takes."""
    value = text.partition("=")[2]
    if name in groups():
        return f"{name} is one of {', '.join(groups()[name])}"
    key = keys.find(name)
    if key is None or key.expected.startswith(("text", "a path")):
        return f"quote the value, e.g. {name}=\"'{value}'\""
    if key.expected.startswith("a list") and not value.startswith("["):
        return f"write {name}=[{value}]"
    return f"{name} is {key.expected}"


def _chosen(group: str, value: Any, options: Sequence[str]) -> str:
    if value in options:
        return f"{group}={value}"
    suggestion = keys.nearest(str(value), options)
    hint = f"did you mean {group}={suggestion}? " if suggestion else ""
    raise ConfigError(
        f"{group}={value} is unknown: {hint}{group} is one of {', '.join(options)}; "
        f"set a single key of it as {group}.KEY=VALUE"
    )


def _unknown(name: str, known: Sequence[str]) -> str:
    suggestion = keys.nearest(name, known)
    if suggestion:
        return f"{name} is unknown: did you mean {suggestion}?"
    section = name.rpartition(".")[0]
    below = [candidate.rpartition(".")[2] for candidate in known if candidate.rpartition(".")[0] == section]
    if not below:
        return f"{name} is unknown: `mobula show-config` lists every key"
    return f"{name} is unknown: {section or 'a run'} has {', '.join(below)}"


def _validated(values: Mapping[Any, Any]) -> RunConfig:
    """Strict validation: a text is no number and true is no 1. JSON keeps lists, paths and enums writable in YAML."""
    try:
        return RunConfig.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        raise ConfigError("\n".join(_sentence(detail) for detail in error.errors())) from error


def _without_missing(values: Any) -> Any:
    """`values` without the keys that were left to the user, so that validation finds them missing."""
    if isinstance(values, Mapping):
        return {key: _without_missing(value) for key, value in values.items() if value != MISSING}
    return values


def _sentence(detail: ErrorDetails, prefix: str = "") -> str:
    """One validation error in the user's words; `prefix` is where in a run's configuration the part stands."""
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    name = prefix + ".".join(str(part) for part in detail["loc"])
    key = keys.find(name)
    if key is None:
        return _unknown(name, list(keys.known_keys()))
    if detail["type"] == "missing":
        return f"{name} is missing, expected {key.expected}: give {name}=VALUE"
    quoting = (
        f"; quote a text that looks like a number: {name}=\"'{_as_typed(detail)}'\"" if _is_unquoted(detail) else ""
    )
    return f"{name} got {_shown(detail['input'])}, expected {key.expected}: set {name}=VALUE{quoting}"


def _is_unquoted(detail: ErrorDetails) -> bool:
    return detail["type"] == "string_type" and isinstance(detail["input"], int | float)


def _as_typed(detail: ErrorDetails) -> str:
    """A number as it was typed; of 1e5 nobody knows that any more."""
    return str(detail["input"]) if isinstance(detail["input"], int) else "TEXT"


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)
