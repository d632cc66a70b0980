"""The environment in a child process, and the functions that `ProcessEnvironment` calls there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from mobula.actors.environments.base import Action, Demonstrator, EnvironmentSpec, EpisodeError, Reset, Step
from mobula.actors.environments.registry import build_environment

T = TypeVar("T")


class HostedEnvironment:
    """An environment by positional arguments; the Ray actor of `RayEnvironment`."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self._environment = build_environment(name, options)

    def spec(self) -> EnvironmentSpec:
        return self._environment.spec

    def reset(self, seed: int, options: Mapping[str, Any]) -> Reset:
        return self._environment.reset(seed=seed, options=options)

    def step(self, action: Action) -> Step:
        return self._environment.step(action)

    def demonstrate(self) -> str:
        return cast("Demonstrator", self._environment).demonstrate()


_made: list[HostedEnvironment] = []  # the environment of this process


def make(name: str, options: Mapping[str, Any]) -> EnvironmentSpec:
    """Builds the environment of this process. Called first."""
    _made.append(_checked(HostedEnvironment, name, options))
    return _made[0].spec()


def call(method: str, *args: Any) -> Any:
    return _checked(getattr(_made[0], method), *args)


def _checked(work: Callable[..., T], *args: Any) -> T:
    try:
        return work(*args)
    except EpisodeError:
        raise
    except BaseException as error:
        raise EpisodeError("raised", f"{type(error).__name__}: {error}") from error
