"""OwnedActor: runs a plain class in a Ray actor on any node, for its creator alone."""

from __future__ import annotations

import os
import sys
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayTaskError

from mobula.cluster.errors import DeadlineError, PreflightError, as_raised_by_role
from mobula.cluster.runtime.ray_deaths import PROCESS_GONE, actor_death


class OwnedActor:
    """Calls block, so make them from a thread. The actor ends with its creator, or by `kill`.

    Ray reserves `num_cpus` for it outside the run's placement groups, on any node that has them.
    """

    def __init__(self, role: type, *args: Any, name: str, num_cpus: float) -> None:
        """Raises: PreflightError: this process is not connected to a Ray cluster."""
        if not ray.is_initialized():  # Ray would start a cluster with its own settings, open to the network
            raise PreflightError(
                f"{name} runs in a Ray actor, but this command has no Ray cluster: set environment.host=process"
            )
        self._name = name
        paths = os.pathsep.join(path for path in sys.path if path)  # so that the actor imports the user's modules
        env_vars = {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        options = {"num_cpus": num_cpus, "max_restarts": 0, "runtime_env": {"env_vars": env_vars}}
        remote: Any = ray.remote(role)  # typed for classes that are written out
        self._handle: ray.actor.ActorHandle[Any] = remote.options(**options).remote(*args)

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Returns the result of a method.

        Raises:
            DeadlineError: no result within `timeout_s`; the cluster may lack the CPUs for the actor.
            WorkerDiedError: the actor's process ended.
            Exception: any error of the method.
        """
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
