"""The status of a running run and of its workers, and the interface of roles that can be scaled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from mobula.cluster.runtime.vitals import ObjectStoreUse, Vitals

if TYPE_CHECKING:
    from mobula.cluster.roles import ReplayStats


MAX_WORKERS = 10_000  # of one role; larger numbers are refused as typing errors


class WorkerState(StrEnum):
    """The state of one worker of a pool."""

    STARTING = "starting"  # the process is being created
    JOINING = "joining"  # the process builds the role and loads the model or weights
    SERVING = "serving"
    DRAINING = "draining"  # scaled away: finishes the work in flight and takes no new work
    WAITING = "waiting"  # lost; is restarted after a backoff
    QUARANTINED = "quarantined"  # no restart is left: see `mobula.cluster.workers.restart_policy`


@dataclass(frozen=True)
class WorkerStatus:
    """The status of one worker."""

    name: str  # rollout/0
    state: WorkerState
    version: int | None  # of the weights; None for roles without weights
    num_in_flight: int
    num_restarts: int
    detail: str = ""  # cause of the last loss
    vitals: Vitals | None = None  # of the newest health check; None before the first


class Scalable(Protocol):
    """A role that can be scaled during the run."""

    def status(self) -> Sequence[WorkerStatus]:
        """Returns every worker by index, including those that start or drain."""
        ...

    async def scale(self, num_workers: int) -> None:
        """Sets the target number of workers: new workers start in the background, surplus workers drain.

        Raises:
            ValueError: the role cannot have this number of workers.
        """
        ...


@dataclass(frozen=True)
class InFlightSummary:
    """Number of prompts in flight, and the oldest prompt."""

    num_prompts: int
    oldest_id: str | None  # None if no prompt is in flight
    oldest_age_s: float


@dataclass(frozen=True)
class Progress:
    """The current step and phase of the loop."""

    step: int  # current or last step; 0 before the first
    phase: str
    seconds: float
    step_s: float | None = None  # mean seconds of a step so far; None before the end of the first step
    tokens_per_s: float | None = None  # trained tokens of the last step, per second


@dataclass(frozen=True)
class RunStatus:
    """The state of a whole run, as its driver reports it."""

    run: str
    progress: Progress
    total_steps: int
    in_flight: InFlightSummary
    replay: ReplayStats
    workers: tuple[WorkerStatus, ...]
    num_panels_lost: int  # control panels that died and were replaced
    driver_pid: int
    posted_at: float  # seconds since the epoch
    loop_lag_s: float = 0.0  # maximum lag of the driver's event loop since the previous status
    object_store: ObjectStoreUse | None = None  # None before the first measurement


@dataclass(frozen=True)
class ScaleRequest:
    """Target numbers of workers of some roles."""

    request_id: str
    wanted: Mapping[str, int]  # role -> workers


@dataclass(frozen=True)
class RoleOutcome:
    """The outcome of one role's part of a request."""

    role: str
    num_workers: int
    refusal: str  # why the part was refused; empty if it was accepted

    @property
    def is_accepted(self) -> bool:
        return not self.refusal
