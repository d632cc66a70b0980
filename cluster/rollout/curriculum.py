"""StageCurriculum: opens the stages of a prompt set one after the other, as the policy succeeds."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpeningRule:
    """When the next stage opens."""

    num_episodes: int  # of the newest stage
    success_rate: float  # required of the last `num_episodes` episodes; 0: any rate


class StageCurriculum:
    """Stages open one after the other and stay open. Only episodes of the newest stage count.

    Example:
        >>> curriculum = StageCurriculum(2, OpeningRule(num_episodes=2, success_rate=1.0))
        >>> curriculum.observe(0, [True, True])
        >>> curriculum.newest
        1
    """

    def __init__(
        self, num_stages: int, rule: OpeningRule, *, on_opened: Callable[[int], None] = lambda stage: None
    ) -> None:
        """`on_opened` gets each stage that opens after the first, and the newest stage after a resume."""
        self._num_stages = num_stages
        self._rule = rule
        self._on_opened = on_opened
        self._outcomes: deque[bool] = deque(maxlen=rule.num_episodes)  # of the newest stage
        self.newest = 0

    def is_open(self, stage: int) -> bool:
        return stage <= self.newest

    def observe(self, stage: int, successes: Sequence[bool]) -> None:
        """Counts ended episodes of a stage, and opens the next stage if the rule is met."""
        if stage != self.newest or self.newest + 1 == self._num_stages:
            return
        self._outcomes.extend(successes)
        num, rule = len(self._outcomes), self._rule
        if num == rule.num_episodes and sum(self._outcomes) >= rule.success_rate * num:
            _logger.info("stage %d opens, with %d of %d episodes solved", self.newest + 1, sum(self._outcomes), num)
            self.newest += 1
            self._outcomes.clear()
            self._on_opened(self.newest)

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, as JSON."""
        return {"newest": self.newest, "outcomes": list(self._outcomes)}

    def restore(self, version: int, state: dict[str, Any]) -> None:
        """Restores the state of a checkpoint."""
        self.newest = min(state["newest"], self._num_stages - 1)
        self._outcomes = deque(state["outcomes"], maxlen=self._rule.num_episodes)
        self._on_opened(self.newest)
