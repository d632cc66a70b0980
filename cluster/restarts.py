"""RestartPolicy: how often a lost worker is started again, and after how long a pause."""

from __future__ import annotations

from dataclasses import dataclass


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
