"""Replay evaluation: scores recorded responses again and compares the components."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mobula.cluster.records.arrow import RecordedGroup
from mobula.cluster.records.trajectory import Reward
from mobula.rewards.contract import RewardRequest
from mobula.rewards.pool.worker import group_requests
from mobula.rewards.recipes import ComponentError

TOTAL = "reward"  # the weighted sum


class RewardsScorer(Protocol):
    """`mobula.rewards.scoring.RewardScoring` with all components."""

    def rewards(self, requests: Sequence[RewardRequest]) -> list[Reward | ComponentError]: ...


@dataclass
class Difference:
    """Recorded and new values of one component, over the responses that have both."""

    name: str
    pairs: list[tuple[float, float]] = field(default_factory=list)  # (then, now)

    @property
    def mean_then(self) -> float:
        return math.fsum(then for then, _ in self.pairs) / len(self.pairs)

    @property
    def mean_now(self) -> float:
        return math.fsum(now for _, now in self.pairs) / len(self.pairs)

    @property
    def num_changed(self) -> int:
        return sum(then != now for then, now in self.pairs)

    @property
    def largest_change(self) -> float:
        return max(abs(now - then) for then, now in self.pairs)


@dataclass
class Rescoring:
    """The comparison over all recorded responses. Components of only one side are listed, not compared."""

    num_responses: int = 0
    num_unscored_then: int = 0
    num_unscored_now: int = 0
    differences: dict[str, Difference] = field(default_factory=dict)
    not_compared: set[str] = field(default_factory=set)

    def add(self, then: Reward | None, now: Reward | None) -> None:
        """Adds the recorded and the new reward of one response; None if scoring failed."""
        self.num_responses += 1
        self.num_unscored_then += then is None
        self.num_unscored_now += now is None
        if then is None or now is None:
            return
        values_then, values_now = {**then.components, TOTAL: then.value}, {**now.components, TOTAL: now.value}
        self.not_compared |= values_then.keys() ^ values_now.keys()
        for name in values_then.keys() & values_now.keys():
            self.differences.setdefault(name, Difference(name)).pairs.append((values_then[name], values_now[name]))


def rescore(scorer: RewardsScorer, groups: Iterable[RecordedGroup]) -> Rescoring:
    """Scores each group again, by text alone, and compares the rewards with the record."""
    result = Rescoring()
    for recorded in groups:
        now = scorer.rewards(group_requests(recorded.group, images=()))
        for before, after in zip(recorded.rewards, now, strict=True):
            result.add(before, after if isinstance(after, Reward) else None)
    return result
