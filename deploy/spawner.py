"""Spawner: starts a role's workers where the plan puts them, with the environment that this cluster needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.network import LOOPBACK
from cluster.placement import PlacedWorker, PlacementPlan
from cluster.placement_groups import Booking
from cluster.ray_group import spawn
from configs.schema import RunConfig
from deploy.session import Session


class Spawner:
    """Knows plan, bookings and environment; every role of a run is started through it."""

    def __init__(
        self, config: RunConfig, session: Session, plan: PlacementPlan, bookings: Mapping[str, Booking]
    ) -> None:
        self.plan = plan
        self._bookings = bookings
        self._env = _environment(config, session)

    def workers(self, role: str) -> tuple[PlacedWorker, ...]:
        return self.plan.of_role(role)

    def start(
        self,
        role_class: type,
        *args: Any,
        worker: PlacedWorker,
        env: Mapping[str, str] | None = None,
        max_concurrency: int = 1,
        **kwargs: Any,
    ) -> Any:
        """The handle of one worker, which builds itself in the background."""
        return spawn(
            role_class,
            *args,
            worker=worker,
            booking=self._bookings[worker.name],
            env={**self._env, **(env or {})},
            max_concurrency=max_concurrency,
            **kwargs,
        )


def engine_environment(config: RunConfig, worker: PlacedWorker) -> dict[str, str]:
    """What vLLM reads from the environment of one rollout actor.

    On CPU the engine binds its own threads, and shares one process with its worker: on few cores every process that
    passes messages costs throughput.
    """
    if config.resources.device == "cuda":
        return {}
    cores = ",".join(str(core) for core in worker.cores)
    binding = {"VLLM_CPU_OMP_THREADS_BIND": cores} if cores else {}
    return {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_CI_ENV": "1", **binding}


def _environment(config: RunConfig, session: Session) -> dict[str, str]:
    """For every worker: nothing is reported to anybody, and on a private cluster everything stays on the loopback."""
    env = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if Path(config.policy.model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if session.is_local:
        env |= {"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": LOOPBACK}
        env |= {"NCCL_SOCKET_IFNAME": "lo"} if config.resources.device == "cuda" else {}
    return env
