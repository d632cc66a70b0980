"""Status and scaling of a running run: the control panel that commands call, and the driver's loop behind it.

    mobula status, mobula scale  ->  ControlPanel (a named actor)  <-  ControlLoop (in the driver)  ->  Scalable roles

The driver serves no requests. It calls the panel every `interval_s` with the newest status and the outcomes of
requests. The reply has the new requests.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

from mobula.cluster.errors import MobulaError
from mobula.cluster.roles import ReplayStats
from mobula.cluster.runtime.ray_actors import answer
from mobula.cluster.runtime.vitals import ObjectStoreUse
from mobula.cluster.workers.status import (
    MAX_WORKERS,
    InFlightSummary,
    Progress,
    RoleOutcome,
    RunStatus,
    Scalable,
    ScaleRequest,
    WorkerStatus,
)
from mobula.cluster.workers.supervisor import background_tasks

_logger = logging.getLogger(__name__)

CONTROL = "control"  # the panel's name in the namespace of its run
OUTCOMES_KEPT = 64
LAG_PERIOD_S = 0.1  # between measurements of the event loop's lag


class ControlPanel:
    """Holds the newest status of a run, and the requests of users until the driver's next call."""

    def __init__(self) -> None:
        self._status: RunStatus | None = None
        self._requests: list[ScaleRequest] = []
        self._outcomes: OrderedDict[str, tuple[RoleOutcome, ...] | None] = OrderedDict()

    def exchange(self, status: RunStatus, outcomes: Mapping[str, tuple[RoleOutcome, ...]]) -> list[ScaleRequest]:
        """Takes the driver's status and the outcomes of requests by id. Returns the new requests."""
        self._status = status
        self._outcomes.update(outcomes)
        while len(self._outcomes) > OUTCOMES_KEPT:
            self._outcomes.popitem(last=False)
        taken, self._requests = self._requests, []
        return taken

    def status(self) -> RunStatus | None:
        """Returns the newest status; None before the driver's first call."""
        return self._status

    def ask(self, request: ScaleRequest) -> tuple[RoleOutcome, ...] | None:
        """Returns the outcome of a request; None until the driver has reported it.

        A new request is kept for the driver's next call. A waiting client repeats its request, so a panel that replaces
        a lost panel gets it too. A request names a target number, so applying it twice does no harm.
        """
        if request.request_id not in self._outcomes:
            self._outcomes[request.request_id] = None
            self._requests.append(request)
        return self._outcomes[request.request_id]

    def close(self) -> None:
        """Does nothing: the panel holds no resources."""


@dataclass(eq=False)
class ControlLoop:
    """The driver's side. A panel that dies or does not answer is counted and replaced; it never ends the run."""

    run: str
    total_steps: int
    _: KW_ONLY
    spawn_panel: Callable[[], Any]  # returns the Ray handle of a `ControlPanel`
    end_panel: Callable[[Any], Awaitable[None]]
    progress: Callable[[], Progress]
    in_flight: Callable[[], InFlightSummary]
    replay: Callable[[], Awaitable[ReplayStats]]
    roles: Mapping[str, Scalable]
    ranks: Callable[[], Sequence[WorkerStatus]]  # workers that cannot be scaled
    object_store: Callable[[], ObjectStoreUse]  # may block
    earlier_scale: Mapping[str, int]  # numbers of workers from before a resume, applied once `has_begun()`
    has_begun: Callable[[], bool]
    on_scaled: Callable[[str, int], None]  # gets each number that a role accepts
    on_panel_lost: Callable[[str], None]  # gets the kind of each loss
    on_status: Callable[[RunStatus], None]
    interval_s: float
    start_s: float  # bounds the first call to a panel, including the start of its process
    deadline_s: float  # bounds each later call
    scale_s: float  # in which a role accepts or refuses a number

    def __post_init__(self) -> None:
        self._panel: Any = None
        self._num_panels_lost = 0
        self._lag_s = 0.0  # since the last status
        self._requests: asyncio.Queue[ScaleRequest] = asyncio.Queue()
        self._outcomes: dict[str, tuple[RoleOutcome, ...]] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        try:
            async with background_tasks() as tasks:
                tasks.create_task(self._exchange_repeatedly(), name="exchange status with the control panel")
                tasks.create_task(self._measure_lag(), name="measure the event loop's lag")
                tasks.create_task(self._scale_roles(), name="scale roles")
                yield
        finally:
            await self._drop_panel()

    async def _exchange_repeatedly(self) -> None:
        while True:
            status = await self._status()
            self.on_status(status)
            try:
                await self._exchange(status)
            except Exception as error:  # the run does not need the panel; the next call starts a new one
                self._num_panels_lost += 1
                self.on_panel_lost(type(error).__name__)
                _logger.warning("the control panel was lost (%s) and is replaced: %s", type(error).__name__, error)
                await self._drop_panel()
            await asyncio.sleep(self.interval_s)

    async def _exchange(self, status: RunStatus) -> None:
        is_new = self._panel is None
        if is_new:
            self._panel = self.spawn_panel()
        sent = dict(self._outcomes)
        call = self._panel.exchange.remote(status, sent)
        timeout_s = self.start_s if is_new else self.deadline_s
        for request in await answer(call, timeout_s=timeout_s, what="the control panel to take the run's status"):
            self._requests.put_nowait(request)
        for request_id in sent:
            del self._outcomes[request_id]

    async def _drop_panel(self) -> None:
        dropped, self._panel = self._panel, None
        if dropped is None:
            return
        try:
            await self.end_panel(dropped)
        except Exception:  # the old panel is no longer used
            _logger.warning("the control panel did not close cleanly", exc_info=True)

    async def _status(self) -> RunStatus:
        lag_s, self._lag_s = self._lag_s, 0.0
        return RunStatus(
            run=self.run,
            progress=self.progress(),
            total_steps=self.total_steps,
            in_flight=self.in_flight(),
            replay=await self.replay(),
            workers=(*(worker for role in self.roles.values() for worker in role.status()), *self.ranks()),
            num_panels_lost=self._num_panels_lost,
            driver_pid=os.getpid(),
            posted_at=time.time(),
            loop_lag_s=lag_s,
            object_store=await asyncio.to_thread(self.object_store),
        )

    async def _measure_lag(self) -> None:
        """Measures how late the event loop resumes a sleeping task. Every task of the driver waits as long."""
        clock = asyncio.get_running_loop().time
        while True:
            due = clock() + LAG_PERIOD_S
            await asyncio.sleep(LAG_PERIOD_S)
            self._lag_s = max(self._lag_s, clock() - due)

    async def _scale_roles(self) -> None:
        while self.earlier_scale and not self.has_begun():  # roles cannot be scaled earlier
            await asyncio.sleep(self.interval_s)
        for role, num_workers in self.earlier_scale.items():
            await self._scale(role, num_workers)
        while True:
            request = await self._requests.get()
            outcomes = [await self._scale(role, num_workers) for role, num_workers in request.wanted.items()]
            self._outcomes[request.request_id] = tuple(outcomes)

    async def _scale(self, role: str, num_workers: int) -> RoleOutcome:
        refusal = await self._refusal(role, num_workers)
        _logger.info("scale %s=%d: %s", role, num_workers, refusal or "accepted")
        if not refusal:
            self.on_scaled(role, num_workers)
        return RoleOutcome(role, num_workers, refusal)

    async def _refusal(self, role: str, num_workers: int) -> str:
        """Applies one role's part of a request. Returns why it was refused, or an empty string."""
        if role not in self.roles:
            return f"this run has no scalable role {role}: it has {', '.join(self.roles) or 'none'}"
        if num_workers > MAX_WORKERS:
            return f"a role has at most {MAX_WORKERS} workers: ask for fewer"
        try:
            async with asyncio.timeout(self.scale_s):
                await self.roles[role].scale(num_workers)
        except TimeoutError:
            return f"{role} did not answer within {self.scale_s:g} s: try again, or read run.log"
        except (ValueError, MobulaError) as error:
            return str(error)
        except Exception as error:  # a failed scaling must not end the run
            _logger.exception("scale %s=%d failed", role, num_workers)
            return f"{type(error).__name__}: {error}; run.log has the traceback"
        return ""
