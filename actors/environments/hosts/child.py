"""Functions that `ProcessEnvironment` calls in its subprocess."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from mobula.actors.environments.base import (
    Action,
    Demonstrator,
    Environment,
    EnvironmentSpec,
    EpisodeError,
    Reset,
    Step,
)
from mobula.actors.environments.registry import build_environment

T = TypeVar("T")

_made: list[Environment] = []  # the environment of this process


def make(name: str, options: Mapping[str, Any]) -> EnvironmentSpec:
    """Builds the environment of this process. Called first."""
    _made.append(_checked(lambda: build_environment(name, options)))
    return _made[0].spec


def reset(seed: int, options: Mapping[str, Any]) -> Reset:
    return _checked(lambda: _made[0].reset(seed=seed, options=options))


def step(action: Action) -> Step:
    return _checked(lambda: _made[0].step(action))


def demonstrate() -> str:
    return _checked(lambda: cast("Demonstrator", _made[0]).demonstrate())


def _checked(work: Callable[[], T]) -> T:
    try:
        return work()
    except EpisodeError:
        raise
    except BaseException as error:
        raise EpisodeError("raised", f"{type(error).__name__}: {error}") from error
