"""RayEnvironment: an environment in a Ray actor on any node, which is killed when a call times out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from mobula.actors.environments.base import Action, Demonstrator, EnvironmentSpec, EpisodeError, Reset, Step
from mobula.actors.environments.registry import build_environment
from mobula.cluster.errors import DeadlineError, WorkerDiedError
from mobula.cluster.runtime.ray_actors import OwnedActor


class HostedEnvironment:
    """The Ray actor: forwards calls to an environment."""

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


class RayEnvironment:
    """Implements `Environment`. A failed call kills the actor."""

    spec: EnvironmentSpec

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        *,
        num_cpus: float,
        start_timeout_s: float,
        reset_timeout_s: float,
        step_s: float,
    ) -> None:
        self._name = name
        self._timeouts = {"spec": start_timeout_s, "reset": reset_timeout_s, "step": step_s, "demonstrate": step_s}
        self._actor = OwnedActor(HostedEnvironment, name, dict(options), name=f"environment {name}", num_cpus=num_cpus)
        self.spec = self._called("spec")

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Reset:
        return self._called("reset", seed, dict(options))

    def step(self, action: Action) -> Step:
        return self._called("step", action)

    def demonstrate(self) -> str:
        return self._called("demonstrate")

    def close(self) -> None:
        self._actor.kill()

    def _called(self, method: str, *args: Any) -> Any:
        problem: Exception
        try:
            return self._actor.call(method, *args, timeout_s=self._timeouts[method])
        except DeadlineError as error:
            kind, problem = "timed_out", error
        except WorkerDiedError as error:
            kind, problem = "process_died", error
        except Exception as error:  # any error of an environment fails the episode, never the run
            kind, problem = "raised", error
        self._actor.kill()
        raise EpisodeError(kind, f"environment {self._name} in {method}: {type(problem).__name__}: {problem}")
