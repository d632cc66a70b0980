"""One reward worker: a group in, one reward or one named failure a trajectory out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.errors import DeadlineError, RewardError
from cluster.objects import fetch
from cluster.trajectory import Reward, Trajectory, TrajectoryGroup
from configs.schema import RewardComponent
from rewards.combine import ComponentError, build_components, score_response
from rewards.contract import FailureKind, RewardRequest
from rewards.isolated import IsolatedProcess
from rewards.tools import Tools


@dataclass(frozen=True)
class ScoringFailure:
    """Why one trajectory has no reward."""

    trajectory_id: str
    component: str
    kind: FailureKind
    reason: str


@dataclass(frozen=True)
class GroupScore:
    """One group's rewards in the order of its trajectories; None where `failures` says why."""

    rewards: tuple[Reward | None, ...]
    failures: tuple[ScoringFailure, ...]


class RewardWorker:
    """Scores groups, one at a time, and never takes much longer than `group_timeout_s` for one.

    Functions that may hang run in a process that the worker owns: each call has `function_timeout_s`, importing what
    it needs `start_timeout_s`. Once a group's time is used up, what is left of it is counted as timed out.
    """

    def __init__(
        self,
        components: Sequence[RewardComponent],
        *,
        object_timeout_s: float,
        start_timeout_s: float,
        function_timeout_s: float,
        group_timeout_s: float,
        device: str,
        dtype: str,
    ) -> None:
        self._isolated = IsolatedProcess(timeout_s=function_timeout_s, start_timeout_s=start_timeout_s)
        self._components = build_components(components, Tools(self._isolated, device, dtype))
        self._object_timeout_s = object_timeout_s
        self._group_timeout_s = group_timeout_s

    def score(self, groups: Sequence[Any]) -> list[GroupScore]:
        """Score groups given as object refs or values; refs come in a sequence, so that fetching has our deadline.

        Raises:
            RewardError: a group did not arrive within `object_timeout_s`.
            LostObjectError: a group went with its node.
        """
        try:
            found = fetch(groups, timeout_s=self._object_timeout_s, what="groups to score")
        except DeadlineError as error:
            raise RewardError(f"{error}: raise timeouts.object_s, or see whether their node is alive") from error
        return [self._score_group(group) for group in found]

    def ping(self) -> bool:
        """Answers once the worker is built and free."""
        return True

    def close(self) -> None:
        """End the isolated process."""
        self._isolated.close()

    def _score_group(self, group: TrajectoryGroup) -> GroupScore:
        self._isolated.deadline = time.monotonic() + self._group_timeout_s
        outcomes = [self._score_trajectory(group, trajectory) for trajectory in group.trajectories]
        return GroupScore(
            rewards=tuple(outcome if isinstance(outcome, Reward) else None for outcome in outcomes),
            failures=tuple(outcome for outcome in outcomes if isinstance(outcome, ScoringFailure)),
        )

    def _score_trajectory(self, group: TrajectoryGroup, trajectory: Trajectory) -> Reward | ScoringFailure:
        prompt = group.prompt
        request = RewardRequest(trajectory.response, prompt.references, prompt.metadata, prompt.text)
        try:
            return score_response(self._components, request)
        except ComponentError as error:
            return ScoringFailure(trajectory.trajectory_id, error.component, error.kind, error.reason)
