"""OwnedActor: runs a plain class in a Ray actor that belongs to one process."""

from __future__ import annotations

import os
import sys
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayTaskError

from mobula.cluster.errors import DeadlineError, PreflightError, as_raised_by_role
from mobula.cluster.runtime.ray_actors import PROCESS_GONE, actor_death


class OwnedActor:
    """A Ray actor with blocking calls: make them from a thread. It ends with its creator, or by `kill`.

    Ray reserves `num_cpus` for the actor outside the run's placement groups, on any node with enough CPUs.
    """

    def __init__(self, role: type, *args: Any, name: str, num_cpus: float) -> None:
        """Raises: PreflightError: this process is not connected to a Ray cluster."""
        if not ray.is_initialized():  # otherwise Ray starts a cluster with default settings, open to the network
            raise PreflightError(
                f"{name} runs in a Ray actor, but this command has no Ray cluster: set environment.host=process"
            )
        self._name = name
        paths = os.pathsep.join(path for path in sys.path if path)  # for imports of the user's modules in the actor
        env_vars = {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        options = {"num_cpus": num_cpus, "max_restarts": 0, "runtime_env": {"env_vars": env_vars}}
        remote: Any = ray.remote(role)  # typed for classes that are written out
        self._handle: ray.actor.ActorHandle[Any] = remote.options(**options).remote(*args)

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Returns the result of a method."""
        try:
            return ray.get(getattr(self._handle, method).remote(*args), timeout=timeout_s)
        except GetTimeoutError as error:
            raise DeadlineError(f"waited {timeout_s:g} s for {method} of {self._name}") from error
        except RayTaskError as error:
            if isinstance(error.cause, Exception):
                raise as_raised_by_role(error.cause) from None
            raise
        except PROCESS_GONE as error:
            raise actor_death(error, f"{method} of {self._name}") from None

    def kill(self) -> None:
        """Kills the actor's process."""
        ray.kill(self._handle, no_restart=True)
