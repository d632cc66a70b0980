"""The roles around the weights, as small as can be. They import no torch, so another one is there soon."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from sabotage import Saboteur

from mobula.cluster.records.trajectory import Answers, ScoredGroup, TrajectoryGroup
from mobula.cluster.runtime.object_store import fetch_or_miss
from mobula.rewards.contract import Score
from mobula.rewards.pool.worker import GroupOutcomes, Question

OBJECT_S = 5.0


class SmallReward:
    """Gives the siblings of a group different rewards."""

    def __init__(self, name: str, folder: Path) -> None:
        self._saboteur = Saboteur(folder)
        self._saboteur.enlist(name)

    def ping(self) -> bool:
        return True

    def score(self, questions: Sequence[Question]) -> list[GroupOutcomes]:
        self._saboteur.moment("scoring")
        found = fetch_or_miss([question.group for question in questions], timeout_s=OBJECT_S, what="groups")
        return [_by_position(group) for group in found]

    def close(self) -> None: ...


def _by_position(group: TrajectoryGroup | Answers) -> GroupOutcomes:
    is_by_value = isinstance(group, Answers)
    ids = group.trajectory_ids if is_by_value else tuple(trajectory.trajectory_id for trajectory in group.trajectories)
    return GroupOutcomes("default", ids, tuple({"place": Score(float(i))} for i, _ in enumerate(ids)))


class SmallScorer:
    """A frozen policy with the same log-prob for every token."""

    def __init__(self, name: str, folder: Path) -> None:
        self._saboteur = Saboteur(folder)
        self._saboteur.enlist(name)

    def load(self, folder: Path) -> None: ...

    def score(self, groups: Sequence[ScoredGroup]) -> list[list[np.ndarray]]:
        self._saboteur.moment("in_reference")
        found = fetch_or_miss([group.group for group in groups], timeout_s=OBJECT_S, what="groups")
        return [[np.full(t.num_steps, -0.5, np.float32) for t in group.trajectories] for group in found]

    def score_one(self, group: ScoredGroup) -> list[np.ndarray]:
        return self.score([group])[0]

    def ping(self) -> bool:
        return True

    def close(self) -> None: ...
