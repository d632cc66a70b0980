"""RestartPolicy: how often a lost worker is restarted, and after how long a pause.

`RepeatedCause` detects causes that a restart does not remove, before the budget is used up.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from mobula.cluster.errors import DeadlineError, PlacementError, WorkerDiedError
from mobula.cluster.workers.status import WorkerStatus

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
        """Counts a failure. Returns whether the last MAX_EQUAL failures are equal.

        A process that was killed from outside, or did not answer, has no cause of its own and ends a series.
        """
        cause = _own_cause(error)
        if cause is None:
            self.succeeded()
            return False
        self._num = self._num + 1 if self._last == (position, cause) else 1
        self._last = (position, cause)
        return self.are_equal

    @property
    def are_equal(self) -> bool:
        """Whether the last MAX_EQUAL failures equal each other."""
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
