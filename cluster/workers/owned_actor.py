"""OwnedActor: a plain class in a Ray actor that its maker alone uses, wherever the cluster has room for it."""

from __future__ import annotations

import os
import sys
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayTaskError

from mobula.cluster.errors import DeadlineError, PreflightError, as_raised_by_role
from mobula.cluster.runtime.ray_deaths import PROCESS_GONE, actor_death


class OwnedActor:
    """Blocks in every call, so call it from a thread. The actor ends with its maker, or by `kill`.

    Ray books `num_cpus` for it, outside the run's placement groups, and places it on any node that has them.
    """

    def __init__(self, role: type, *args: Any, name: str, num_cpus: float) -> None:
        """Raises: PreflightError: this process has joined no cluster."""
        if not ray.is_initialized():  # Ray would start a cluster with its own settings, open to the network
            raise PreflightError(
                f"{name} is to run in a Ray actor, and this command has no cluster: set environment.host=process"
            )
        self._name = name
        paths = os.pathsep.join(path for path in sys.path if path)  # where modules of the user's are found
        env_vars = {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        options = {"num_cpus": num_cpus, "max_restarts": 0, "runtime_env": {"env_vars": env_vars}}
        self._handle = ray.remote(role).options(**options).remote(*args)

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """The result of a method.

        Raises:
            DeadlineError: none within `timeout_s`, be it that the cluster has no room for the actor.
            WorkerDiedError: its process ended.
            Exception: whatever the method raised.
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
        """End its process at once, whatever it does."""
        ray.kill(self._handle, no_restart=True)
