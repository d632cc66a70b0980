"""The YAML groups, their options, and the values that an option sets.

An option's file may include other options of the group (`defaults: [held_out, _self_]`). An option sets the values in
its file and in the included options.

Options are searched in this directory, the directories of `MOBULA_TASKS` and of `examples/`, in this order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from mobula.configs.errors import ConfigError

FOLDER = Path(__file__).parent
EXAMPLES = FOLDER.parent / "examples"  # inside the package `mobula`, also in a wheel
TASKS_VARIABLE = "MOBULA_TASKS"
"""Environment variable: the user's directories with groups (such as `examples/sums`), separated by colons."""
MISSING = "???"  # a value that the user must set
EXPERIMENT = "experiment"
SMALL_EXAMPLE = "digits"
"""The experiment of `examples/` for checks of a machine: needs neither a GPU nor files."""
GLOBAL_PACKAGE = "# @package _global_"
# Keys that values are computed from in group files, and their types.
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
def roots() -> tuple[Path, ...]:
    """The directories with groups. The first directory with an option's file decides.

    Raises:
        ConfigError: a directory of `MOBULA_TASKS` is missing, or one of its options has the name of a built-in one.
    """
    tasks = [Path(name).resolve() for name in os.environ.get(TASKS_VARIABLE, "").split(":") if name]
    for task in tasks:
        if not task.is_dir():
            raise ConfigError(f"{TASKS_VARIABLE} names {task}, which is no directory: correct or unset it")
        for file in task.glob("*/*.yaml"):
            if (FOLDER / file.relative_to(task)).is_file():
                raise ConfigError(f"{file} has the name of a built-in option of {file.parent.name}: rename it")
    return (FOLDER, *tasks, *sorted(folder for folder in EXAMPLES.iterdir() if folder.is_dir()))


@cache
def groups() -> Mapping[str, tuple[str, ...]]:
    """Group -> options."""
    names = sorted(folder.name for folder in FOLDER.iterdir() if any(folder.glob("*.yaml")))
    files = {name: {file.stem for root in roots() for file in (root / name).glob("*.yaml")} for name in names}
    return {name: tuple(sorted(stems)) for name, stems in files.items()}


def option_file(group: str, option: str) -> Path:
    """The file of an existing option."""
    return next(file for root in roots() if (file := root / group / f"{option}.yaml").is_file())


def layers() -> tuple[str, ...]:
    """The groups in the order of `config.yaml`, from weak to strong; the experiment is last."""
    entries = yaml.safe_load((FOLDER / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    return tuple(group for entry in entries if isinstance(entry, dict) for group in entry)


def own_values(group: str, option: str) -> dict[str, Any]:
    """The values that an option sets in a run's configuration, without values that the user must set."""
    text = option_file(group, option).read_text(encoding="utf-8")
    content = yaml.safe_load(text) or {}
    values: dict[str, Any] = {}
    for entry in content.pop("defaults", []):
        if isinstance(entry, str) and entry != "_self_":
            merge(values, own_values(group, entry.partition("@")[0]))
    settings = without_missing(content)
    return merge(values, settings if text.startswith(GLOBAL_PACKAGE) else {group: settings})


def merge(values: dict[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Merges `others` into `values` recursively, and returns `values`. An empty mapping replaces a value."""
    for key, other in others.items():
        if isinstance(other, Mapping) and other and isinstance(values.get(key), dict):
            merge(values[key], other)
        else:
            values[key] = merge({}, other) if isinstance(other, Mapping) else other
    return values


def leaves(values: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields dotted name and value of the leaves of nested mappings; an empty mapping is a leaf."""
    if isinstance(values, Mapping) and values:
        for key, value in values.items():
            yield from leaves(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, values


def without_missing(values: Any) -> Any:
    """`values` without keys that the user must set."""
    if isinstance(values, Mapping):
        return {key: without_missing(value) for key, value in values.items() if value != MISSING}
    if isinstance(values, list):
        return [without_missing(value) for value in values]
    return values
