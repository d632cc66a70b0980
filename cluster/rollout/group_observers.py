"""Observers of groups: a curriculum whose stages open as the policy succeeds, and the counts of rejected groups."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mobula.cluster.metrics.definitions import CounterName, MetricName
from mobula.cluster.metrics.hub import Metrics
from mobula.cluster.records.trajectory import GroupOutcome, Reward
from mobula.cluster.rollout.dispatcher import OVER_AGE, GroupObserver

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
        return {"newest": self.newest, "outcomes": list(self._outcomes)}

    def restore(self, version: int, state: dict[str, Any]) -> None:
        self.newest = min(state["newest"], self._num_stages - 1)
        self._outcomes = deque(state["outcomes"], maxlen=self._rule.num_episodes)
        self._on_opened(self.newest)


@dataclass(eq=False)
class EpisodeStages(GroupObserver):
    """Implements `Resumable`: shows a curriculum the episodes of training prompts.

    They count once the next version is announced, in the order of the prompts, so the stages of a synchronous run do
    not depend on which group is finished first.
    """

    curriculum: StageCurriculum
    place_of: Callable[[str], tuple[int, int]]  # returns the index of a prompt in the sequence, and its stage
    is_success: Callable[[Reward], bool]

    def __post_init__(self) -> None:
        self._waiting: list[tuple[int, int, list[bool]]] = []  # index of the prompt, stage, successes

    def finished(self, outcome: GroupOutcome) -> None:
        successes = [self.is_success(reward) for reward in outcome.rewards]
        self._waiting.append((*self.place_of(outcome.group_id), successes))

    def advanced(self) -> None:
        waiting, self._waiting = self._waiting, []
        for _, stage, successes in sorted(waiting):
            self.curriculum.observe(stage, successes)

    def state(self) -> dict[str, Any]:
        return {**self.curriculum.state(), "waiting": self._waiting}

    def restore(self, version: int, state: dict[str, Any]) -> None:
        self.curriculum.restore(version, state)
        self._waiting = [(index, stage, successes) for index, stage, successes in state.get("waiting", ())]


class RejectionCounts(GroupObserver):
    """Implements `Resumable`: counts rejected groups, their responses and tokens by reason since the start of the run.
    Their rewards enter the step's means over all sampled groups.

    Dropping slow groups favours short responses, so the mean length of over-age responses is a gauge.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        names = (CounterName.REJECTED, CounterName.REJECTED_RESPONSES, CounterName.REJECTED_TOKENS)
        self._counts = {name: Counter[str]() for name in names}

    def rejected(self, outcome: GroupOutcome, reason: str) -> None:
        for counter, num in zip(self._counts.values(), (1, outcome.num_responses, outcome.num_tokens), strict=True):
            counter.update({reason: num} if num else {})
        if outcome.num_responses:
            unscored = [None] * (outcome.num_responses - len(outcome.rewards))
            self._metrics.rejected([*outcome.rewards, *unscored])
        self._publish()

    def state(self) -> dict[str, Any]:
        return {name.value: dict(counter) for name, counter in self._counts.items()}

    def restore(self, version: int, state: dict[str, Any]) -> None:
        self._counts = {name: Counter(state[name.value]) for name in self._counts}
        self._publish()

    def _publish(self) -> None:
        for name, counter in self._counts.items():
            self._metrics.set_counts(name, counter)
        groups, responses, tokens = (counter[OVER_AGE] for counter in self._counts.values())
        if groups:
            self._metrics.observe(MetricName.DROPPED_LENGTH, tokens / responses)
