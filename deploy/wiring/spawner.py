"""Spawner: starts workers at their planned places, with the environment of the cluster; and scales roles."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources

from mobula.cluster.controller import GroupQueue
from mobula.cluster.environment_variables import UMASK
from mobula.cluster.errors import PlacementError
from mobula.cluster.files import write_atomically
from mobula.cluster.metrics.definitions import CounterName
from mobula.cluster.metrics.hub import STARTING
from mobula.cluster.rollout.in_flight import InFlightRequests
from mobula.cluster.runtime.network import LOOPBACK
from mobula.cluster.runtime.object_store import object_store_use
from mobula.cluster.runtime.placement import PlacedWorker, PlacementPlan, check_room, place_at
from mobula.cluster.runtime.placement_groups import (
    Booking,
    book_more,
    bundle_of,
    cluster_nodes,
    remove_placement_groups,
)
from mobula.cluster.runtime.ray_actors import role_log, spawn, spawn_named, stop
from mobula.cluster.user_code import FOLDER_VARIABLE
from mobula.cluster.workers.control import CONTROL, ControlLoop, ControlPanel
from mobula.cluster.workers.status import Scalable, WorkerState, WorkerStatus
from mobula.configs.schema import ResourcesConfig, RunConfig
from mobula.deploy.host.session import ClusterSession
from mobula.deploy.preloading.preloaded import Preloaded, library_environment
from mobula.deploy.wiring.persistence import RunContext

_logger = logging.getLogger(__name__)
GROUP_LABEL = "ray.io/node-group"  # label of nodes that an autoscaler (cluster launcher, KubeRay) started


class Autoscaler:
    """The pending request of one run for a cluster size.

    Ray keeps a request until it is replaced, and compares it with all resources of the cluster, not with the free ones.
    So a request contains the run's reservations plus the missing resources.
    """

    def __init__(self) -> None:
        self._has_asked = False

    def ask(self, bundles: Sequence[Mapping[str, float]]) -> str:
        """Requests a cluster that holds all `bundles` at a time. Returns the result as a sentence for the user."""
        if not any(node["Alive"] and GROUP_LABEL in node["Labels"] for node in ray.nodes()):
            return "The cluster has no autoscaler that could add a node"
        request_resources(bundles=[dict(bundle) for bundle in bundles])
        self._has_asked = True
        return "The autoscaler has been asked for a node: ask again when it has joined (`ray status`)"

    def withdraw(self) -> None:
        if self._has_asked:
            request_resources(bundles=[])
            self._has_asked = False


BOOKING_S = 30.0  # for one joining worker, after a check for free resources


class Spawner:
    """Starts every role of a run with its reservation and environment. Workers that join later are reserved one by one.

    Methods that reserve resources or query the cluster block: call them in a thread.
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
        `preloaded` forks the workers; without it each imports its modules."""
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
        """Returns the places of a role's workers in one reservation; replaces all of them if one node is gone."""
        planned = self.plan.of_role(role)
        with self._lock:
            self._give_up_if_gone([worker.name for worker in planned])
            return self._book(role, [worker.index for worker in planned])

    def release(self, role: str, index: int) -> None:
        name = f"{role}/{index}"
        with self._lock:
            if name in self._placed:
                del self._placed[name]
                remove_placement_groups({name: self._bookings.pop(name)})

    def _book(self, role: str, indices: Sequence[int]) -> tuple[PlacedWorker, ...]:
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
        with self._lock:
            remove_placement_groups(self._bookings)
            self._bookings.clear()
            self._placed.clear()
            self._autoscaler.withdraw()


def _environment(config: RunConfig, session: ClusterSession) -> dict[str, str]:
    own = {FOLDER_VARIABLE: os.getcwd(), UMASK: f"{config.umask:o}"}
    env = library_environment(config) | session.mark.environment | own
    if session.is_local:
        env |= {"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": LOOPBACK}
        env |= {"NCCL_SOCKET_IFNAME": "lo"} if config.resources.device == "cuda" else {}
    return env


SCALE_FILE = "scale.json"  # in the run folder
VISIT_INTERVAL_S = 1.0
VISIT_DEADLINE_S = 20.0  # of one call to the panel


@dataclass(frozen=True)
class RoleHosts:
    """Implements `mobula.cluster.workers.work_queue.Hosts`: workers of one role, each with a separate reservation."""

    spawner: Spawner
    role: str
    make: Callable[[PlacedWorker], Any]  # creates the worker at a place and returns its handle
    stop_s: float

    async def start(self, index: int) -> Any:
        return self.make(await asyncio.to_thread(self.spawner.book, self.role, index))

    async def stop(self, index: int, handle: Any) -> None:
        await stop(handle, timeout_s=self.stop_s, what=f"{self.role}/{index}")

    async def release(self, index: int) -> None:
        await asyncio.to_thread(self.spawner.release, self.role, index)


class ScaleFile:
    def __init__(self, folder: Path, resources: ResourcesConfig) -> None:
        self._path = folder / SCALE_FILE
        self._configured = {role: workers.num_workers for role, workers in resources.roles.items()}

    def note(self, role: str, num_workers: int) -> None:
        row = {"num_workers": num_workers, "configured": self._configured[role]}
        write_atomically(self._path, json.dumps({**self._read(), role: row}, indent=1))

    def earlier(self) -> dict[str, int]:
        """Returns role -> workers where it differs from the configuration. A number configured after the scaling takes
        precedence."""
        rows = {role: row for role, row in self._read().items() if role in self._configured}
        return {
            role: row["num_workers"]
            for role, row in rows.items()
            if row["configured"] == self._configured[role] != row["num_workers"]
        }

    def _read(self) -> dict[str, dict[str, int]]:
        try:
            return json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}


@dataclass(frozen=True)
class RoomFirst:
    """A scalable role that checks the cluster's free resources before it grows."""

    role: str
    workers: Scalable
    check_room: Callable[[str, int], None]  # of a role and a number; raises a `PlacementError`, and may block

    def status(self) -> Sequence[WorkerStatus]:
        return self.workers.status()

    async def scale(self, num_workers: int) -> None:
        staying = sum(worker.state is not WorkerState.DRAINING for worker in self.status())
        if num_workers > staying:
            await asyncio.to_thread(self.check_room, self.role, num_workers - staying)
        await self.workers.scale(num_workers)


def control_loop(
    run: RunContext,
    spawner: Spawner,
    roles: Mapping[str, Scalable],
    in_flight_requests: InFlightRequests | None,
    replay: GroupQueue,
    ranks: Callable[[], Sequence[WorkerStatus]],
) -> ControlLoop:
    """Answers `mobula status` and `mobula scale`. `ranks` lists workers that cannot be scaled; `in_flight_requests` is
    None for a job without engines."""
    config, metrics = run.config, run.metrics
    stop_s, scale_file = config.timeouts.stop_s, ScaleFile(config.run_folder, config.resources)
    return ControlLoop(
        config.name,
        config.num_steps,
        spawn_panel=partial(spawner.start_named, ControlPanel, CONTROL),
        end_panel=lambda panel: stop(panel, timeout_s=stop_s, what="the control panel"),
        progress=metrics.progress,
        in_flight=(in_flight_requests or InFlightRequests(config.sampler.chunk_tokens)).summary,
        replay=replay.stats,
        roles={role: RoomFirst(role, workers, spawner.check_room) for role, workers in roles.items()},
        ranks=ranks,
        object_store=object_store_use,
        earlier_scale=scale_file.earlier(),
        has_begun=lambda: metrics.progress().phase != STARTING,
        on_scaled=scale_file.note,
        on_panel_lost=lambda kind: metrics.count(CounterName.RESTARTS, f"control_{kind}"),
        on_status=metrics.post,
        interval_s=VISIT_INTERVAL_S,
        start_s=config.timeouts.start_s,
        deadline_s=VISIT_DEADLINE_S,
        scale_s=BOOKING_S,
    )
