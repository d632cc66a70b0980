"""RestartPolicy: how often a lost worker is started again, and after how long a pause.

A cause that a restart does not change is found by `RepeatedCause` before the budget is used up.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from mobula.cluster.errors import DeadlineError, PlacementError, WorkerDiedError
from mobula.cluster.workers.status import WorkerStatus

MAX_EQUAL = 3  # failures in a row with one cause, at one position, before no further restart is tried


@dataclass(frozen=True)
class RestartPolicy:
    """At most `max_restarts` within `window_s` seconds; each waits twice as long as the one before."""

    max_restarts: int
    window_s: float
    backoff_s: float
    max_backoff_s: float

    def delay(self, num_restarts: int) -> float:
        """Seconds to wait before restart number `num_restarts` (from 1) of the window."""
        return min(self.max_backoff_s, self.backoff_s * 2 ** (num_restarts - 1))

    def used_up(self, role: str, workers: Iterable[WorkerStatus]) -> WorkerDiedError:
        """The error that ends a run in which no worker of `role` may be started again."""
        details = "; ".join(f"{worker.name}: {worker.detail}" for worker in workers)
        return WorkerDiedError(
            f"every {role} worker is lost, and no restart is left (supervision.max_restarts={self.max_restarts} within "
            f"{self.window_s:g} s, or {MAX_EQUAL} starts that fail with one cause): {details}; fix the cause, then go "
            "on with resume=auto"
        )


class RestartBudget:
    """The restarts of one worker that its policy still counts. `now` is seconds that never run backwards."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._at: list[float] = []
        self.num_restarts = 0

    def take(self, now: float) -> float | None:
        """The pause before the next restart; None if the budget is used up."""
        self._at = [at for at in self._at if now - at < self._policy.window_s]
        if len(self._at) >= self._policy.max_restarts:
            return None
        self._at.append(now)
        self.num_restarts += 1
        return self._policy.delay(len(self._at))


class RepeatedCause:
    """Counts failures in a row with one cause at one position, such as the step that was under way."""

    def __init__(self) -> None:
        self._last: tuple[Hashable, str] | None = None
        self._num = 0

    def failed(self, error: Exception, position: Hashable = None) -> bool:
        """Count a failure; whether it is the MAX_EQUAL'th in a row that equals the one before.

        A process that was ended from outside, or that did not answer, has no cause of its own and ends a series.
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
    """The cause of a worker that ended itself; equal for equal causes."""
    if isinstance(error, DeadlineError | PlacementError):  # a cluster without room may have some later
        return None
    failure = getattr(error, "failure", None)
    if failure is not None:
        return failure.fingerprint or (str(failure) if failure.frames else None)
    return None if isinstance(error, WorkerDiedError) else f"{type(error).__name__}: {error}"
