"""Status of workers, and when a worker is restarted."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from mobula.cluster.errors import DeadlineError, PlacementError, WorkerDiedError
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
    QUARANTINED = "quarantined"  # no restart is left: see `mobula.cluster.workers.status`


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

    async def scale(self, num_workers: int) -> None:
        """Sets the target number of workers: new workers start in the background, surplus workers drain.

        Raises:
            ValueError: the role cannot have this number of workers.
        """


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


# RestartPolicy: how often a lost worker is restarted, and after how long a pause.
#
# `RepeatedCause` detects causes that a restart does not remove, before the budget is used up.

MAX_EQUAL = 3  # failures in a row with one cause at one position; then no restart is tried


@dataclass(frozen=True)
class RestartPolicy:
    """At most `max_restarts` within `window_s` seconds. Each pause is twice as long as the previous one."""

    max_restarts: int
    window_s: float
    backoff_s: float
    max_backoff_s: float

    def delay(self, num_restarts: int) -> float:
        """Returns the seconds to wait before restart number `num_restarts` (from 1) of the window."""
        return min(self.max_backoff_s, self.backoff_s * 2 ** (num_restarts - 1))

    def used_up(self, role: str, workers: Iterable[WorkerStatus]) -> WorkerDiedError:
        """Returns the error that ends a run when no worker of `role` may be restarted."""
        details = "; ".join(f"{worker.name}: {worker.detail}" for worker in workers)
        return WorkerDiedError(
            f"every {role} worker is lost, and no restart is left (supervision.max_restarts={self.max_restarts} within "
            f"{self.window_s:g} s, or {MAX_EQUAL} failed starts with one cause): {details}; fix the cause, then go on "
            "with resume=auto"
        )


class RestartBudget:
    """Counts the restarts of one worker within the window. `now` comes from a monotonic clock, in seconds."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._at: list[float] = []
        self.num_restarts = 0

    def take(self, now: float, num_without_progress: int = 0) -> float | None:
        """Takes a restart and returns the pause before it, in seconds; None if the budget is used up.

        `num_without_progress` is the number of restarts since the last completed work. `max_restarts` limits it at any
        age: restarts that each wait long for a node or a deadline never fill the window.
        """
        self._at = [at for at in self._at if now - at < self._policy.window_s]
        if max(len(self._at), num_without_progress) >= self._policy.max_restarts:
            return None
        self._at.append(now)
        self.num_restarts += 1
        return self._policy.delay(len(self._at))


class RepeatedCause:
    """Counts failures in a row with one cause at one position (such as the current step)."""

    def __init__(self) -> None:
        self._last: tuple[Hashable, str] | None = None
        self._num = 0

    def failed(self, error: Exception, position: Hashable = None) -> bool:
        """Counts a failure. Returns whether the last MAX_EQUAL failures are equal. A process that was killed from
        outside, or did not answer, has no cause of its own and ends a series."""
        cause = _own_cause(error)
        if cause is None:
            self.succeeded()
            return False
        self._num = self._num + 1 if self._last == (position, cause) else 1
        self._last = (position, cause)
        return self.are_equal

    @property
    def are_equal(self) -> bool:
        return self._num >= MAX_EQUAL

    def succeeded(self) -> None:
        self._last, self._num = None, 0


def _own_cause(error: Exception) -> str | None:
    """Returns the cause of a worker that ended by itself, equal for equal causes; None for other ends."""
    if isinstance(error, DeadlineError | PlacementError):  # a full cluster may have room later
        return None
    failure = getattr(error, "failure", None)
    if failure is not None:
        return failure.fingerprint or (str(failure) if failure.frames else None)
    return None if isinstance(error, WorkerDiedError) else f"{type(error).__name__}: {error}"
