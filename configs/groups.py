"""The YAML groups: which options each one has, and what an option itself says.

An option's file may build on other options of its group (`defaults: [held_out, _self_]`) and on the group's `_base`,
which holds what all options share. What an option says is the content of its file and of the options that it builds on;
what stands in `_base` says nothing about the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
MISSING = "???"  # a value that is left to the user
EXPERIMENT = "experiment"
GLOBAL_PACKAGE = "# @package _global_"
# Keys that files compute from, and their types.
COMPUTED_FROM = {
    "resources.num_nodes": int,
    "resources.device": str,
    "policy.lora.rank": int,
    "sampler.max_tokens": int,
}
COMPUTATIONS: Mapping[str, Callable[..., Any]] = {  # `${NAME:${KEY},...}` in files
    "times": lambda a, b: a * b,
    "if_positive": lambda number, yes, no: yes if number > 0 else no,
    "if_gpu": lambda device, yes, no: yes if device != "cpu" else no,
}


@cache
def groups() -> Mapping[str, tuple[str, ...]]:
    """The options of every group, by the group's name; a file named `_...` is shared by options and is none itself."""
    folders = sorted(folder for folder in FOLDER.iterdir() if any(folder.glob("*.yaml")))
    return {folder.name: _options(folder) for folder in folders}


def layers() -> tuple[str, ...]:
    """The groups in the order in which `config.yaml` lays them on top of each other, the experiment last."""
    entries = yaml.safe_load((FOLDER / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    return tuple(group for entry in entries if isinstance(entry, dict) for group in entry)


def own_values(group: str, option: str) -> dict[str, Any]:
    """The values that an option sets in a run's configuration, without those that are left to the user."""
    text = (FOLDER / group / f"{option}.yaml").read_text(encoding="utf-8")
    content = yaml.safe_load(text) or {}
    values: dict[str, Any] = {}
    for entry in content.pop("defaults", []):
        if isinstance(entry, str) and not entry.startswith("_"):
            merge(values, own_values(group, entry.partition("@")[0]))
    said = without_missing(content)
    return merge(values, said if text.startswith(GLOBAL_PACKAGE) else {group: said})


def merge(values: dict[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Lay `others` on top of `values`, mapping by mapping; anything else is replaced, also by an empty mapping."""
    for key, other in others.items():
        if isinstance(other, Mapping) and other and isinstance(values.get(key), dict):
            merge(values[key], other)
        else:
            values[key] = merge({}, other) if isinstance(other, Mapping) else other
    return values


def leaves(values: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of everything in nested mappings that is no mapping, or an empty one."""
    if isinstance(values, Mapping) and values:
        for key, value in values.items():
            yield from leaves(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, values


def without_missing(values: Any) -> Any:
    """`values` without the keys that were left to the user."""
    if isinstance(values, Mapping):
        return {key: without_missing(value) for key, value in values.items() if value != MISSING}
    if isinstance(values, list):
        return [without_missing(value) for value in values]
    return values


def _options(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in folder.glob("*.yaml") if not path.stem.startswith("_")))
