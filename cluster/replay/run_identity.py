"""Configuration keys that must not change when a run is resumed, and keys whose change is reported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mobula.configs.on_resume import DECLARED, OnResume, on_resume
from mobula.configs.schema.run import RunConfig


def run_identity(config: RunConfig) -> dict[str, Any]:
    """Returns the dotted keys that must not change when a run is resumed -> value, as JSON. Keys of disabled parts are
    omitted.
    """
    values = config.model_dump(mode="json")
    off = tuple(_off(config))
    return {key: _at(values, key) for key in DECLARED[OnResume.REFUSED] if not key.startswith(off)}


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


def _at(values: Mapping[str, Any], key: str) -> Any:
    for part in key.split("."):
        values = values[part]
    return values


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
