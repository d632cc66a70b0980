"""ProcessEnvironment: an environment in a subprocess, which is killed when a call times out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mobula.actors.environments.base import Action, EnvironmentSpec, EpisodeError, Reset, Step
from mobula.actors.environments.hosts import child
from mobula.cluster.errors import DeadlineError, WorkerDiedError
from mobula.cluster.runtime.child.process import ChildProcess, RaisedError

T = TypeVar("T")


class ProcessEnvironment:
    """Implements `Environment`. A failed call kills the subprocess."""

    spec: EnvironmentSpec

    def __init__(
        self, name: str, options: Mapping[str, Any], *, start_timeout_s: float, reset_timeout_s: float, step_s: float
    ) -> None:
        self._name = name
        self._reset_timeout_s = reset_timeout_s
        self._step_timeout_s = step_s
        self._child = ChildProcess()
        self.spec = self._call(start_timeout_s, child.make, name, dict(options))

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Reset:
        return self._call(self._reset_timeout_s, child.reset, seed, dict(options))

    def step(self, action: Action) -> Step:
        return self._call(self._step_timeout_s, child.step, action)

    def demonstrate(self) -> str:
        return self._call(self._step_timeout_s, child.demonstrate)

    def close(self) -> None:
        """Kills the subprocess and its children, and reaps it."""
        self._child.close()

    def _call(self, timeout_s: float, function: Callable[..., T], *args: Any) -> T:
        try:
            return self._child.call(timeout_s, function, *args)
        except BaseException as error:
            self.close()  # the state of the environment is unknown
            call, name = function.__name__, self._name
            if isinstance(error, DeadlineError):
                raise EpisodeError("timed_out", f"waited {timeout_s:g} s for {call} of environment {name}") from error
            if isinstance(error, WorkerDiedError):
                raise EpisodeError("process_died", f"environment {name} in {call}: {error}") from error
            if isinstance(error, EpisodeError | RaisedError):
                kind = error.kind if isinstance(error, EpisodeError) else "raised"
                raise EpisodeError(kind, f"environment {name} raised in {call}: {error}") from error
            raise
