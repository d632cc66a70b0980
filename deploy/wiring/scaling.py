"""Scales a run: places joining workers, checks free resources, and answers requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mobula.cluster.controller import GroupQueue
from mobula.cluster.metrics.definitions import CounterName
from mobula.cluster.metrics.files import write_atomically
from mobula.cluster.metrics.hub import STARTING, Metrics
from mobula.cluster.rollout.in_flight import InFlightRequests
from mobula.cluster.runtime.object_store import object_store_use
from mobula.cluster.runtime.placement import PlacedWorker
from mobula.cluster.runtime.ray_actors import stop
from mobula.cluster.workers.control import CONTROL, ControlLoop, ControlPanel
from mobula.cluster.workers.status import Scalable, WorkerState, WorkerStatus
from mobula.configs.schema import ResourcesConfig, RunConfig
from mobula.deploy.wiring.spawner import BOOKING_S, Spawner

SCALE_FILE = "scale.json"  # in the run folder
VISIT_INTERVAL_S = 1.0
VISIT_DEADLINE_S = 20.0  # of one call to the panel


class RoleHosts:
    """Implements `mobula.cluster.workers.work_queue.Hosts`: workers of one role, each with a separate reservation."""

    def __init__(self, spawner: Spawner, role: str, start: Callable[[PlacedWorker], Any], *, stop_s: float) -> None:
        """`start` creates the worker at a place and returns its handle."""
        self._spawner = spawner
        self._role = role
        self._start = start
        self._stop_s = stop_s

    async def start(self, index: int) -> Any:
        return self._start(await asyncio.to_thread(self._spawner.book, self._role, index))

    async def stop(self, index: int, handle: Any) -> None:
        await stop(handle, timeout_s=self._stop_s, what=f"{self._role}/{index}")

    async def release(self, index: int) -> None:
        await asyncio.to_thread(self._spawner.release, self._role, index)


class ScaleFile:
    """Keeps the requested numbers of workers in the run folder for a resume."""

    def __init__(self, folder: Path, resources: ResourcesConfig) -> None:
        self._path = folder / SCALE_FILE
        self._configured = {role: workers.num_workers for role, workers in resources.roles.items()}

    def note(self, role: str, num_workers: int) -> None:
        """Records the number that a role accepted."""
        row = {"num_workers": num_workers, "configured": self._configured[role]}
        write_atomically(self._path, json.dumps({**self._read(), role: row}, indent=1))

    def earlier(self) -> dict[str, int]:
        """Returns role -> workers where it differs from the configuration. A number configured after the scaling takes
        precedence.
        """
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


class RoomFirst:
    """A scalable role that checks the cluster's free resources before it grows."""

    def __init__(self, role: str, workers: Scalable, check_room: Callable[[str, int], None]) -> None:
        """`check_room(role, num_more)` raises a `PlacementError`; it may block."""
        self._role = role
        self._workers = workers
        self._check_room = check_room

    def status(self) -> Sequence[WorkerStatus]:
        return self._workers.status()

    async def scale(self, num_workers: int) -> None:
        """Sets the target number of workers.

        Raises:
            PlacementError: the cluster has no room for the additional workers.
            ValueError: the role does not allow this number.
        """
        staying = sum(worker.state is not WorkerState.DRAINING for worker in self.status())
        if num_workers > staying:
            await asyncio.to_thread(self._check_room, self._role, num_workers - staying)
        await self._workers.scale(num_workers)


def control_loop(
    config: RunConfig,
    spawner: Spawner,
    roles: Mapping[str, Scalable],
    in_flight_requests: InFlightRequests,
    replay: GroupQueue,
    metrics: Metrics,
    ranks: Callable[[], Sequence[WorkerStatus]],
) -> ControlLoop:
    """Answers `mobula status` and `mobula scale` for this run; `ranks` lists workers that cannot be scaled."""
    stop_s, scale_file = config.timeouts.stop_s, ScaleFile(config.run_folder, config.resources)
    return ControlLoop(
        config.name,
        config.num_steps,
        spawn_panel=partial(spawner.start_named, ControlPanel, CONTROL),
        end_panel=lambda panel: stop(panel, timeout_s=stop_s, what="the control panel"),
        progress=metrics.progress,
        in_flight=in_flight_requests.summary,
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
