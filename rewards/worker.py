"""One reward worker: groups in, for each response what every component of the worker's service says of it out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.errors import DeadlineError, RewardError
from cluster.media import MediaReader
from cluster.objects import fetch
from cluster.trajectory import Prompt, TrajectoryGroup
from configs.schema.rewards import RewardsConfig
from rewards.contract import Outcome, RewardRequest
from rewards.isolated_pool import IsolatedPool
from rewards.scoring import Scoring
from rewards.tools import Tools

MAX_PICTURES = 64  # that one worker keeps at hand


@dataclass(frozen=True)
class GroupOutcomes:
    """What one service says of a group: for each trajectory, in order, component -> outcome."""

    label: str  # of the group's recipe
    trajectory_ids: tuple[str, ...]
    outcomes: tuple[Mapping[str, Outcome], ...]


class RewardWorker:
    """Scores groups, one call at a time, and never takes much longer than `group_timeout_s` for each of them.

    Functions that may hang run in `rewards.processes` processes that the worker owns: each call has `function_timeout_s`, importing what
    it needs `start_timeout_s`. Once the time of a call's groups is used up, what is left is counted as timed out.
    """

    def __init__(
        self,
        rewards: RewardsConfig,
        service: str,
        *,
        object_timeout_s: float,
        start_timeout_s: float,
        function_timeout_s: float,
        group_timeout_s: float,
        device: str,
        dtype: str,
    ) -> None:
        self._isolated = IsolatedPool(
            num_processes=rewards.processes, timeout_s=function_timeout_s, start_timeout_s=start_timeout_s
        )
        self._scoring = Scoring(rewards, service, Tools(self._isolated, device, dtype))
        own = [component for component in rewards.components if component.service == service]
        self._needs_pictures = any(component.needs_pictures for component in own)
        self._media = MediaReader(timeout_s=object_timeout_s, max_items=MAX_PICTURES)
        self._object_timeout_s = object_timeout_s
        self._group_timeout_s = group_timeout_s

    def score(
        self, groups: Sequence[Any], earlier: Sequence[Sequence[Mapping[str, Outcome]] | None]
    ) -> list[GroupOutcomes]:
        """Score groups given as object refs or values; refs come in a sequence, so that fetching has our deadline.

        `earlier[i]` holds what other services said of group i's responses, where gates look at it.

        Raises:
            RewardError: a group did not arrive within `object_timeout_s`.
            LostObjectError: a group went with its node.
        """
        try:
            found = fetch(groups, timeout_s=self._object_timeout_s, what="groups to score")
            pictures = [self._pictures(group.prompt) for group in found]
        except DeadlineError as error:
            raise RewardError(f"{error}: raise timeouts.object_s, or see whether their node is alive") from error
        self._isolated.deadline = time.monotonic() + len(found) * self._group_timeout_s
        return self._score(found, pictures, earlier)

    def ping(self) -> bool:
        """Answers once the worker is built and free."""
        return True

    def close(self) -> None:
        """End the isolated processes."""
        self._isolated.close()

    def _pictures(self, prompt: Prompt) -> tuple[bytes, ...]:
        return tuple(media.file for media in self._media.read(prompt.media)) if self._needs_pictures else ()

    def _score(
        self,
        groups: Sequence[TrajectoryGroup],
        pictures: Sequence[tuple[bytes, ...]],
        earlier: Sequence[Sequence[Mapping[str, Outcome]] | None],
    ) -> list[GroupOutcomes]:
        """All responses of all groups together: what a model scores as one batch."""
        with_pictures = zip(groups, pictures, strict=True)
        requests = [request for group, files in with_pictures for request in group_requests(group, files)]
        before = [
            known
            for group, said in zip(groups, earlier, strict=True)
            for known in (said if said is not None else [{}] * len(group.trajectories))
        ]
        outcomes = iter(self._scoring.outcomes(requests, before))
        return [
            GroupOutcomes(
                label=self._scoring.book.label(group.prompt.metadata),
                trajectory_ids=tuple(t.trajectory_id for t in group.trajectories),
                outcomes=tuple(next(outcomes) for _ in group.trajectories),
            )
            for group in groups
        ]


def group_requests(group: TrajectoryGroup, pictures: tuple[bytes, ...]) -> list[RewardRequest]:
    """One request a response; `pictures` are the files of the prompt's."""
    prompt = group.prompt
    return [
        RewardRequest(t.response, prompt.references, prompt.metadata, prompt.text, pictures) for t in group.trajectories
    ]
