"""Composes the YAML groups with PyYAML alone, for machines without Hydra and pydantic.

    config = load_bare(["experiment=sums", "sampler=huggingface", "learner.learning_rate=0.001"])

The values equal those of `mobula.configs.load.load_config`; words are not checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from mobula.configs.groups import (
    COMPUTATIONS,
    EXPERIMENT,
    FOLDER,
    GLOBAL_PACKAGE,
    groups,
    layers,
    merge,
    option_file,
    own_values,
    without_missing,
)
from mobula.configs.rules import checked
from mobula.configs.schema.base import defaults, without_unread
from mobula.configs.schema.run import RunConfig

OVERRIDE = "override /"  # opens an entry of an experiment's defaults that chooses an option
COMPUTED = re.compile(r"\$\{(\w+):\$\{([\w.]+)\},([^}]*)\}")


def load_bare(words: Sequence[str]) -> RunConfig:
    """The configuration of `GROUP=OPTION` and `KEY=VALUE`; a value is read as YAML.

    Raises:
        ValueError: a key is missing or unknown, or sections contradict.
    """
    pairs = dict(word.split("=", 1) for word in words)
    chosen = {name: value for name, value in pairs.items() if name in groups()}
    values = _composed(chosen)
    for group in layers():
        if group in chosen and group != EXPERIMENT:
            merge(values, own_values(group, chosen[group]))
    for name in sorted(pairs.keys() - chosen.keys(), key=lambda name: name.count(".")):
        merge(values, _nested(name.split("."), yaml.safe_load(pairs[name])))
    values = without_unread(RunConfig, without_missing(_computed(values, values)))
    return checked(RunConfig.model_validate(values))


def _composed(chosen: Mapping[str, str]) -> dict[str, Any]:
    """The schema's defaults, and on top the options of all groups, each with the options that it builds on."""
    values = merge(defaults(RunConfig), _content(FOLDER / "config.yaml"))
    options = {group: option for entry in _mappings(values.pop("defaults")) for group, option in entry.items()}
    if EXPERIMENT in chosen:
        options |= _choices(chosen[EXPERIMENT])
    for group, option in {**options, **chosen}.items():
        if option is not None:
            merge(values, _layer(group, option))
    return values


def _choices(experiment: str) -> dict[str, str]:
    """Group -> option, as an experiment and those that it builds on choose them."""
    chosen: dict[str, str] = {}
    for entry in _content(option_file(EXPERIMENT, experiment)).get("defaults", []):
        if isinstance(entry, Mapping):
            chosen |= {name.removeprefix(OVERRIDE): option for name, option in entry.items()}
        elif entry != "_self_":
            chosen |= _choices(entry)
    return chosen


def _layer(group: str, option: str) -> dict[str, Any]:
    """Everything that an option sets, those of the options that it builds on included."""
    file = option_file(group, option)
    content = _content(file)
    values: dict[str, Any] = {}
    for entry in content.pop("defaults", []):
        if isinstance(entry, str) and entry != "_self_":
            merge(values, _layer(group, entry.partition("@")[0]))
    is_global = file.read_text(encoding="utf-8").startswith(GLOBAL_PACKAGE)
    return merge(values, content if is_global else {group: content})


def _computed(values: Any, whole: Mapping[str, Any]) -> Any:
    """`values` with the numbers that files compute from other keys of `whole`."""
    if isinstance(values, Mapping):
        return {key: _computed(value, whole) for key, value in values.items()}
    found = COMPUTED.fullmatch(values) if isinstance(values, str) else None
    if found is None:
        return values
    source: Any = whole
    for part in found[2].split("."):
        source = source[part]
    source = _computed(source, whole)
    return COMPUTATIONS[found[1]](source, *(yaml.safe_load(argument) for argument in found[3].split(",")))


def _nested(path: Sequence[str], value: Any) -> dict[str, Any]:
    return {path[0]: _nested(path[1:], value) if len(path) > 1 else value}


def _mappings(entries: Iterable[Any]) -> list[Mapping[str, Any]]:
    return [entry for entry in entries if isinstance(entry, Mapping)]


def _content(file: Any) -> dict[str, Any]:
    return yaml.safe_load(file.read_text(encoding="utf-8")) or {}
