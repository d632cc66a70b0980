"""The YAML groups: which options each one has, and what an option itself says.

An option's file may build on other options of its group (`defaults: [held_out, _self_]`). What an option says is the
content of its file and of the options that it builds on; the defaults of the schema say nothing about the choice.

Options are looked up in this directory, in those of `MOBULA_TASKS` and in those of `examples/`, in this order.
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
"""Environment variable: directories of the user with groups, as `examples/sums` is one, separated by colons."""
MISSING = "???"  # a value that is left to the user
EXPERIMENT = "experiment"
SMALL_EXAMPLE = "digits"
"""The experiment of `examples/` that needs neither a GPU nor files; checks of a machine train it."""
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
def roots() -> tuple[Path, ...]:
    """The directories that hold groups. The first that has an option's file decides.

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
    """The options of every group, by the group's name."""
    names = sorted(folder.name for folder in FOLDER.iterdir() if any(folder.glob("*.yaml")))
    files = {name: {file.stem for root in roots() for file in (root / name).glob("*.yaml")} for name in names}
    return {name: tuple(sorted(stems)) for name, stems in files.items()}


def option_file(group: str, option: str) -> Path:
    """The file of an option that exists."""
    return next(file for root in roots() if (file := root / group / f"{option}.yaml").is_file())


def layers() -> tuple[str, ...]:
    """The groups in the order in which `config.yaml` lays them on top of each other, the experiment last."""
    entries = yaml.safe_load((FOLDER / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    return tuple(group for entry in entries if isinstance(entry, dict) for group in entry)


def own_values(group: str, option: str) -> dict[str, Any]:
    """The values that an option sets in a run's configuration, without those that are left to the user."""
    text = option_file(group, option).read_text(encoding="utf-8")
    content = yaml.safe_load(text) or {}
    values: dict[str, Any] = {}
    for entry in content.pop("defaults", []):
        if isinstance(entry, str) and entry != "_self_":
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
