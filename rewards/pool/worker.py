"""RewardWorker: scores the responses of groups that it is asked about."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mobula.cluster.errors import DeadlineError, RewardError, StuckError
from mobula.cluster.records.media import MediaReader
from mobula.cluster.records.trajectory import Answers, Prompt, Response, TrajectoryGroup
from mobula.cluster.runtime.object_store import fetch_or_miss
from mobula.configs.schema.rewards import RewardsConfig
from mobula.rewards.components import RewardScoring, is_judged, response_digest
from mobula.rewards.contract import Outcome, RewardRequest
from mobula.rewards.tools import Tools

Outcomes = Mapping[str, Outcome]
"""Component -> outcome, for one response."""


MAX_IMAGES = 64  # cached images of one worker


@dataclass(frozen=True)
class Question:
    """Input of a service: a `TrajectoryGroup` or `Answers`, as object ref or value. `earlier[i]` holds the outcomes of
    other services for response i, if gates need them. `known` maps indices of responses that need no score to digests;
    a response with another digest is scored."""

    group: Any
    earlier: Sequence[Mapping[str, Outcome]] | None = None
    known: Mapping[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class GroupOutcomes:
    """The outcomes of one service for a group: component -> outcome for each trajectory, in order; None if known."""

    label: str  # of the group's recipe
    trajectory_ids: tuple[str, ...]
    outcomes: tuple[Mapping[str, Outcome] | None, ...]
    num_retried: int = 0  # retried responses; the first group of a call has the number of the whole call


class RewardWorker:
    """Scores groups, one call at a time, in little more than `group_timeout_s` per group.

    Functions that may hang run in `rewards.processes` child processes: each call has `function_timeout_s`, an import
    `start_timeout_s`. Models and engines compute in a thread with the same timeout per response. When the time of a
    call is used up, the remaining responses count as timed out.
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
        gpu_share: float = 1.0,
    ) -> None:
        self._tools = Tools.timed(rewards.processes, function_timeout_s, start_timeout_s, device, dtype, gpu_share)
        self._service = service
        self._judged_interval = rewards.judged_interval
        self._scoring = RewardScoring(rewards, service, self._tools)
        own = [component for component in rewards.components if component.service == service]
        self._needs_images = any(component.needs_images for component in own)
        self._media = MediaReader(timeout_s=object_timeout_s, max_items=MAX_IMAGES)
        self._object_timeout_s = object_timeout_s
        self._group_timeout_s = group_timeout_s

    def score(self, questions: Sequence[Question]) -> list[GroupOutcomes]:
        """Scores groups. Refs come inside a sequence, so that Ray does not fetch them and the fetch has our
        deadline."""
        if num_stuck := self._tools.in_time.num_stuck:
            raise StuckError(f"{num_stuck} computations of service {self._service!r} hang since an earlier call")
        try:
            groups = [question.group for question in questions]
            fetched = fetch_or_miss(groups, timeout_s=self._object_timeout_s, what="groups to score")
            asked = [_Asked.of(group, question) for group, question in zip(fetched, questions, strict=True)]
            images = [self._images(group.prompt) for group in asked]
        except DeadlineError as error:
            raise RewardError(f"{error}: raise timeouts.object_s, or see whether their node is alive") from error
        self._tools.end_at(time.monotonic() + len(asked) * self._group_timeout_s)
        return self._score(asked, images)

    def ping(self) -> bool:
        """Returns once the worker is built and free."""
        return True

    def close(self) -> None:
        self._tools.close()

    def _images(self, prompt: Prompt) -> tuple[bytes, ...]:
        """Returns the image files of the prompt; of a video, the frames that the policy saw."""
        if not self._needs_images:
            return ()
        return tuple(file for media in self._media.read(prompt.media) for file in media.files)

    def _score(self, asked: Sequence[_Asked], images: Sequence[tuple[bytes, ...]]) -> list[GroupOutcomes]:
        """Scores all responses of all groups together, so that a model gets one batch."""
        wanted = [(group, i, files) for group, files in zip(asked, images, strict=True) for i in group.wanted]
        requests = [reward_request(group.prompt, group.responses[i], files) for group, i, files in wanted]
        before = None
        if any(group.earlier is not None for group in asked):
            before = [{} if group.earlier is None else group.earlier[i] for group, i, _ in wanted]
        num_retried = self._scoring.num_retried
        judged = [is_judged(group.prompt.prompt_id, self._judged_interval) for group, _, _ in wanted]
        outcomes = iter(self._scoring.outcomes(requests, before, judged))
        num_retried = self._scoring.num_retried - num_retried
        return [
            GroupOutcomes(
                label=self._scoring.book.label(group.prompt.metadata),
                trajectory_ids=group.trajectory_ids,
                outcomes=tuple(next(outcomes) if i in group.wanted else None for i in range(len(group.responses))),
                num_retried=0 if index else num_retried,
            )
            for index, group in enumerate(asked)
        ]


@dataclass(frozen=True)
class _Asked:
    """A question with its fetched group."""

    prompt: Prompt
    trajectory_ids: tuple[str, ...]
    responses: tuple[Response, ...]
    earlier: Sequence[Mapping[str, Outcome]] | None
    wanted: Sequence[int]  # indices of the responses that are not known, ascending

    @classmethod
    def of(cls, group: TrajectoryGroup | Answers, question: Question) -> _Asked:
        if isinstance(group, Answers):
            ids, responses = group.trajectory_ids, group.responses
        else:
            ids = tuple(trajectory.trajectory_id for trajectory in group.trajectories)
            responses = tuple(trajectory.response for trajectory in group.trajectories)
        known = question.known
        wanted: Sequence[int] = range(len(responses))
        if known:
            wanted = [i for i in wanted if i not in known or known[i] != response_digest(responses[i])]
        return cls(group.prompt, ids, responses, question.earlier, wanted)


def reward_request(prompt: Prompt, response: Response, images: tuple[bytes, ...]) -> RewardRequest:
    return RewardRequest(response, prompt.references, prompt.metadata, prompt.text, images)
