"""Spawner: starts workers at their planned places, with the environment of the cluster."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources

from mobula.cluster.environment_variables import UMASK
from mobula.cluster.errors import PlacementError
from mobula.cluster.runtime.network import LOOPBACK
from mobula.cluster.runtime.placement import PlacedWorker, PlacementPlan, check_room, place_at
from mobula.cluster.runtime.placement_groups import (
    Booking,
    book_more,
    bundle_of,
    cluster_nodes,
    remove_placement_groups,
)
from mobula.cluster.runtime.ray_actors import BOUND_THREADS, role_log, spawn, spawn_named
from mobula.cluster.user_code import FOLDER_VARIABLE
from mobula.configs.schema import RunConfig
from mobula.deploy.host.session import ClusterSession
from mobula.deploy.preloading.preloaded import Preloaded, library_environment

GROUP_LABEL = "ray.io/node-group"  # label of nodes that an autoscaler (cluster launcher, KubeRay) started


def has_autoscaler() -> bool:
    """Whether a live node of the connected cluster belongs to a group of an autoscaler."""
    return any(node["Alive"] and GROUP_LABEL in node["Labels"] for node in ray.nodes())


class Autoscaler:
    """The pending request of one run for a cluster size.

    Ray keeps a request until it is replaced, and compares it with all resources of the cluster, not with the free ones.
    So a request contains the run's reservations plus the missing resources.
    """

    def __init__(self) -> None:
        self._has_asked = False

    def ask(self, bundles: Sequence[Mapping[str, float]]) -> str:
        """Requests a cluster that holds all `bundles` at a time. Returns the result as a sentence for the user."""
        if not has_autoscaler():
            return "The cluster has no autoscaler that could add a node"
        request_resources(bundles=[dict(bundle) for bundle in bundles])
        self._has_asked = True
        return "The autoscaler has been asked for a node: ask again when it has joined (`ray status`)"

    def withdraw(self) -> None:
        """Withdraws the request."""
        if self._has_asked:
            request_resources(bundles=[])
            self._has_asked = False


_logger = logging.getLogger(__name__)

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
BOOKING_S = 30.0  # for one joining worker, after a check for free resources


class Spawner:
    """Starts every role of a run with its reservation and environment.

    Workers that join later are reserved one by one. Methods that reserve resources or query the cluster block:
    call them in a thread.
    """

    def __init__(
        self,
        config: RunConfig,
        session: ClusterSession,
        plan: PlacementPlan,
        bookings: Mapping[str, Booking],
        logs: Path | None = None,
        preloaded: Preloaded | None = None,
    ) -> None:
        """`logs` is the folder for a log file of each worker; without it their output stays in Ray's session folder.
        `preloaded` forks the workers; without it each imports its modules.
        """
        self.plan = plan
        self._config = config
        self._bookings = dict(bookings)
        self._placed = {worker.name: worker for worker in plan.workers}
        self._env = _environment(config, session)
        self._logs = None if logs is None else logs.absolute()
        self._preloaded = preloaded
        self._autoscaler = Autoscaler()
        self._lock = threading.Lock()

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
        """Returns the handle of one worker, which loads in the background."""
        return spawn(
            role_class,
            *args,
            worker=worker,
            booking=self._bookings[worker.name],
            env={**self._env, **(env or {})},
            log=None if self._logs is None else role_log(self._logs, worker.name),
            python=None if self._preloaded is None else self._preloaded.python(worker.role),
            max_concurrency=max_concurrency,
            **kwargs,
        )

    def start_named(self, role_class: type, name: str) -> Any:
        """Returns the handle of a named actor, which takes no resources of the plan."""
        return spawn_named(role_class, name=name, env=self._env)

    def check_room(self, role: str, num_more: int) -> None:
        """Checks that `num_more` workers of a role can be reserved now; if not, requests nodes from the autoscaler."""
        with self._lock:
            try:
                check_room(self._config.resources, role, num_more, cluster_nodes())
            except PlacementError as error:
                missing = [bundle_of(self._config.resources.roles[role])] * num_more
                held = [bundle_of(worker) for worker in self._placed.values()]
                raise PlacementError(f"{error}. {self._autoscaler.ask([*held, *missing])}") from error
            self._autoscaler.withdraw()

    def book(self, role: str, index: int) -> PlacedWorker:
        """Returns the place of one worker. Reserves it if necessary, and replaces a place whose node is gone."""
        with self._lock:
            self._give_up_if_gone([f"{role}/{index}"])
            return self._book(role, [index])[0]

    def book_together(self, role: str) -> tuple[PlacedWorker, ...]:
        """Returns the places of a role's workers in one shared reservation; replaces all of them if one node is
        gone."""
        planned = self.plan.of_role(role)
        with self._lock:
            self._give_up_if_gone([worker.name for worker in planned])
            return self._book(role, [worker.index for worker in planned])

    def release(self, role: str, index: int) -> None:
        """Releases the reservation of one worker and ends its processes."""
        name = f"{role}/{index}"
        with self._lock:
            if name in self._placed:
                del self._placed[name]
                remove_placement_groups({name: self._bookings.pop(name)})

    def _book(self, role: str, indices: Sequence[int]) -> tuple[PlacedWorker, ...]:
        """Returns the places of these workers; reserves them together if necessary."""
        names, resources = [f"{role}/{index}" for index in indices], self._config.resources
        if not all(name in self._placed for name in names):
            run_name = f"{self._config.name}/{names[0]}"
            booked = book_more(resources.roles[role], len(names), name=run_name, timeout_s=BOOKING_S)
            bookings = {name: booking for name, (booking, _) in zip(names, booked, strict=True)}
            try:
                for index, name, (_, node) in zip(indices, names, booked, strict=True):
                    seat = sum(w.role == role and w.node_id == node.node_id for w in self._placed.values())
                    self._placed[name] = place_at(resources, role, index, node, seat)
            except PlacementError:
                self._give_up(bookings)
                raise
            self._bookings.update(bookings)
        return tuple(self._placed[name] for name in names)

    def _give_up_if_gone(self, names: Sequence[str]) -> None:
        alive = {node.node_id for node in cluster_nodes()}
        gone = {self._placed[name].node_id for name in names if name in self._placed} - alive
        if gone:
            _logger.warning("another place for %s: node %s is gone", ", ".join(names), ", ".join(sorted(gone)))
            self._give_up({name: self._bookings.pop(name) for name in names})

    def _give_up(self, bookings: Mapping[str, Booking]) -> None:
        for name in bookings:
            self._placed.pop(name, None)
        remove_placement_groups(bookings)

    def close(self) -> None:
        """Releases all reservations."""
        with self._lock:
            remove_placement_groups(self._bookings)
            self._bookings.clear()
            self._placed.clear()
            self._autoscaler.withdraw()


def engine_environment(config: RunConfig, worker: PlacedWorker) -> dict[str, str]:
    """Environment variables that vLLM reads in one rollout actor.

    On CPU the engine binds its own threads, and shares one process with its worker: on few cores every process that
    passes messages costs throughput. vLLM's eager mode still compiles a helper of its sampler, seconds of every start.
    """
    if config.resources.device == "cuda":
        return {}
    cores = ",".join(str(core) for core in worker.cores)
    binding = {BOUND_THREADS: cores} if cores else {}
    eager = {"TORCH_COMPILE_DISABLE": "1"} if config.sampler.vllm.enforce_eager else {}
    return {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_CI_ENV": "1", **eager, **binding}


def learner_environment(config: RunConfig) -> dict[str, str]:
    """Environment variables that torch reads in a rank that trains.

    Micro-batches have other shapes each time. Segments that grow leave fewer gaps between blocks, and give the memory
    of their free pages back when a rank moves to host memory. Pinned blocks of 1 MiB or more are as large as asked for:
    by default they are rounded up to powers of two, and a rank that moves to host memory would pin up to twice as much.
    Settings in the driver's environment stay as they are.
    """
    if config.resources.device != "cuda" or any(name in os.environ for name in ALLOCATOR_VARIABLES):
        return {}
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True,pinned_max_round_threshold_mb:1"}


def _environment(config: RunConfig, session: ClusterSession) -> dict[str, str]:
    """Returns the environment of every worker; loopback addresses on a private cluster."""
    own = {FOLDER_VARIABLE: os.getcwd(), UMASK: f"{config.umask:o}"}
    env = library_environment(config) | session.mark.environment | own
    if session.is_local:
        env |= {"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": LOOPBACK}
        env |= {"NCCL_SOCKET_IFNAME": "lo"} if config.resources.device == "cuda" else {}
    return env
