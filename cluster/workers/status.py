"""The status of a running run and of its workers, and the interface of roles that can be scaled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from mobula.cluster.runtime.vitals import ObjectStoreUse, Vitals

if TYPE_CHECKING:
    from mobula.cluster.roles import ReplayStats


MAX_WORKERS = 10_000  # of one role: beyond it a number is a slip of the hand


class WorkerState(StrEnum):
    """The state of one worker of a pool."""

    STARTING = "starting"  # its process is being created
    JOINING = "joining"  # its process runs, builds itself, and gets its model or weights
    SERVING = "serving"
    DRAINING = "draining"  # it was scaled away: it finishes its work in flight and takes no new work
    WAITING = "waiting"  # it was lost, and is restarted after its backoff
    QUARANTINED = "quarantined"  # no restart is left: see `mobula.cluster.workers.restart_policy`


@dataclass(frozen=True)
class WorkerStatus:
    """One worker, now."""

    name: str  # rollout/0
    state: WorkerState
    version: int | None  # of the weights that it serves; None where that means nothing
    num_in_flight: int
    num_restarts: int
    detail: str = ""  # why it was lost last
    vitals: Vitals | None = None  # of its newest sign of life; None where it has given none


class Scalable(Protocol):
    """A role that can be scaled while the run goes on."""

    def status(self) -> Sequence[WorkerStatus]:
        """Every worker, by index; also those that start or drain."""
        ...

    async def scale(self, num_workers: int) -> None:
        """Have `num_workers` from now on: new ones start in the background, superfluous ones drain and are removed.

        Raises:
            ValueError: the role cannot have that many.
        """
        ...


@dataclass(frozen=True)
class InFlightSummary:
    """How many prompts are being sampled, and which of them for longest."""

    num_prompts: int
    oldest_id: str | None  # None where nothing is in flight
    oldest_age_s: float


@dataclass(frozen=True)
class Progress:
    """The current phase of the loop, and its start."""

    step: int  # being made, or made last; 0 before the first one
    phase: str
    seconds: float
    step_s: float | None = None  # mean seconds of a step so far; None before the first one has ended
    tokens_per_s: float | None = None  # trained, of the last step


@dataclass(frozen=True)
class RunStatus:
    """The state of a whole run, as its driver reports it."""

    run: str
    progress: Progress
    total_steps: int
    in_flight: InFlightSummary
    replay: ReplayStats
    workers: tuple[WorkerStatus, ...]
    num_panels_lost: int  # how often what holds this status had to be started again
    driver_pid: int
    posted_at: float  # seconds since the epoch
    loop_lag_s: float = 0.0  # how late the driver's event loop was, at most, since the status before
    object_store: ObjectStoreUse | None = None  # None until it was looked at


@dataclass(frozen=True)
class ScaleRequest:
    """How many workers some roles are to have from now on."""

    request_id: str
    wanted: Mapping[str, int]  # role -> workers


@dataclass(frozen=True)
class RoleOutcome:
    """The outcome of one role's part of a request."""

    role: str
    num_workers: int
    refusal: str  # why not; empty where it was accepted

    @property
    def is_accepted(self) -> bool:
        return not self.refusal
