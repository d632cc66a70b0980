"""Configuration keys that must not change when a run is resumed, and keys whose change is reported."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import getitem
from typing import Any

from mobula.cluster.user_code import user_files
from mobula.configs.on_resume import DECLARED, OnResume, on_resume
from mobula.configs.schema.run import RunConfig

# Keys of files and folders that must not change; a model may be a hub name
PATHS = ("data.path", "policy.model", "algorithm.supervised.path", "algorithm.distillation.teacher")


DATA_PATH, DATA_FILES = "data.path", "the training files in data.path"  # the second is their fingerprint


def run_identity(config: RunConfig) -> dict[str, Any]:
    """Returns the dotted keys that must not change when a run is resumed -> value, as JSON. Keys of disabled parts are
    omitted."""
    values = config.model_dump(mode="json")
    off = tuple(_off(config))
    return {
        key: reduce(getitem, key.split("."), values) for key in DECLARED[OnResume.REFUSED] if not key.startswith(off)
    }


def same_identity(value: Any, key: str = "") -> Any:
    """Returns an identity such that equal ones are of one run: a path may be spelled in several ways, and a file of
    user code may lie elsewhere."""
    if isinstance(value, Mapping):
        return {name: same_identity(item, f"{key}.{name}".removeprefix(".")) for name, item in value.items()}
    if isinstance(value, list):
        return [same_identity(item, key) for item in value]
    if not isinstance(value, str):
        return value
    if key.startswith(PATHS) and os.path.exists(value):
        return os.path.realpath(value)
    return os.path.basename(value) if user_files(value) else value


def changed_settings(before: Mapping[str, Any], config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Returns key -> (old, new) for changed keys that affect learning. `before` is the run's `config.yaml`."""
    old, new = dict(_leaves(before)), dict(_leaves(config.model_dump(mode="json")))
    return {
        key: (old[key], value)
        for key, value in new.items()
        if key in old and old[key] != value and on_resume(key) is OnResume.NAMED
    }


def _off(config: RunConfig) -> Iterator[str]:
    if not config.environment.is_on:
        yield "environment."
    if not config.algorithm.supervised.is_on:
        yield "algorithm.supervised.max_tokens"
    if config.learner.backend != "deepspeed":
        yield from ("learner.zero_stage", "resources.learner.num_workers")


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
