"""Trajectory: what a sampled response consists of, and its digest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from mobula.cluster.records.actions import Actions, Column, packed, unpacked
from mobula.cluster.records.media import MediaHandle, MediaSpan


def group_digest(group: TrajectoryGroup) -> str:
    """Returns the sha256 of prompt tokens, media keys, actions, behaviour log-probs, masks and weight versions.

    The group gives the same digest after it was written to the journal or the trajectory log and read again.
    """
    prompt = group.prompt
    media = _places(prompt.media, prompt.media_spans)
    digest = hashlib.sha256(repr((group.group_id, media)).encode())
    for ids in (prompt.compact_ids, prompt.expanded_ids):
        digest.update(_bytes(ids, np.int32))
    for trajectory in group.trajectories:
        spans = [(int(span.version), int(span.start), int(span.end)) for span in trajectory.weight_spans]
        shown = _places(trajectory.actions.media, trajectory.actions.media_spans)
        reason = trajectory.finish_reason.value
        digest.update(repr((trajectory.trajectory_id, trajectory.num_steps, spans, shown, reason)).encode())
        for part in trajectory.actions.content():
            digest.update(np.ascontiguousarray(part).data)
        digest.update(_bytes(trajectory.behavior_logprobs, np.float32))
        digest.update(_bytes(trajectory.action_mask, np.bool_))
    return digest.hexdigest()


def _places(media: Sequence[MediaHandle], spans: Sequence[MediaSpan]) -> tuple[list[str], list[tuple[int, int]]]:
    return [medium.key for medium in media], [(int(span.start), int(span.end)) for span in spans]


def _bytes(array: np.ndarray, dtype: type[np.generic]) -> memoryview:
    return np.ascontiguousarray(array, dtype=dtype).data


# The records that roles exchange: Prompt, Trajectory, TrajectoryGroup, Response, Reward, WeightSpan.
#
# All arrays for training have the axis T: the decision steps of one trajectory (generated tokens, or denoising steps).
# The policy's actions in these steps are opaque here (`actions`).

MAX_CHARACTERS_BY_VALUE = 16_384  # of a group's responses; larger responses are fetched by their readers
NO_IDS = np.empty(0, dtype=np.int32)


@dataclass(frozen=True)
class Prompt:
    """One prompt, processed once and shared by its siblings and all roles.

    There are two token sequences: `compact_ids` with one placeholder per medium (engines expand it) and
    `expanded_ids` with one placeholder per vision embedding (for policies). `media[i]` fills `media_spans[i]`.
    """

    prompt_id: str  # unique in the run: "<epoch>/<index>/<sample_id>"
    sample_id: str  # the dataset row's own id
    text: str  # the rendered chat prompt, for reports
    compact_ids: np.ndarray  # int32 [P_compact]
    expanded_ids: np.ndarray  # int32 [P]
    media: tuple[MediaHandle, ...] = ()
    media_spans: tuple[MediaSpan, ...] = ()
    references: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return int(self.expanded_ids.shape[0])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as plain values for speed: prompts are sent more often than any other record."""
        ids = [np.asarray(ids, dtype=np.int32).tobytes() for ids in (self.compact_ids, self.expanded_ids)]
        media = [(h.key, h.modality, h.num_bytes, h.reference, h.source) for h in self.media]
        spans = [(span.start, span.end) for span in self.media_spans]
        rest = (media, spans, self.references, self.metadata)
        return _prompt, (self.prompt_id, self.sample_id, self.text, *ids, *rest)


def _prompt(
    prompt_id: str,
    sample_id: str,
    text: str,
    compact_ids: bytes,
    expanded_ids: bytes,
    media: Sequence[tuple[str, str, int, Any, str]],
    spans: Sequence[tuple[int, int]],
    references: tuple[str, ...],
    metadata: Mapping[str, Any],
) -> Prompt:
    """Rebuilds a prompt from `Prompt.__reduce__`."""
    handles = tuple(MediaHandle(*handle) for handle in media)
    placed = tuple(MediaSpan(*span) for span in spans)
    ids = (np.frombuffer(compact_ids, dtype=np.int32), np.frombuffer(expanded_ids, dtype=np.int32))
    return Prompt(prompt_id, sample_id, text, *ids, handles, placed, references, metadata)


class FinishReason(StrEnum):
    """Why a trajectory ended. Only STOP guarantees a sampled EOS token at the end. The last token of STOP_STRING
    completes one of `sampler.stop_strings`."""

    STOP = "stop"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    ABORT = "abort"
    TERMINATED = "terminated"  # the episode ended
    TRUNCATED = "truncated"  # the episode was cut by its environment, or by a limit of turns, tokens or images


@dataclass(frozen=True)
class WeightSpan:
    """Steps [start, end) were sampled with the weights of `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class EpisodeTurn:
    """One turn of an episode: the policy's steps [start, end) and the observation after them. `rewards` are the parts
    of the environment's reward. `status` is the status of the tool calls; `none` without calls."""

    start: int
    end: int
    action: str
    observation: str
    rewards: Mapping[str, float]
    status: str


@dataclass(frozen=True)
class Response:
    """The input of a reward function: the response alone, without prompt and special tokens.

    `images` are encoded files (PNG, JPEG) sampled by a visual generative policy; for a video, the frames in order. In
    an episode, `text` and `num_tokens` cover only the policy's turns, which `turns` lists. If an episode cannot be
    scored, `failure` has the kind and the message of its failure.
    """

    text: str
    num_tokens: int
    is_truncated: bool
    images: tuple[bytes, ...] = field(default=(), repr=False)
    turns: tuple[EpisodeTurn, ...] = ()
    failure: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles by position for speed: hundreds of responses are sent at a time."""
        return Response, (self.text, self.num_tokens, self.is_truncated, self.images, self.turns, self.failure)


@dataclass(frozen=True)
class EndedResponse:
    """A response that ended before its siblings, as the input of reward functions."""

    prompt: Prompt
    sibling: int
    response: Response


@dataclass(frozen=True)
class Answers:
    """Some or all responses to one prompt, as the input of reward functions. May be sent by value."""

    prompt: Prompt
    siblings: tuple[int, ...]  # indices of `responses` in the group
    responses: tuple[Response, ...]

    @property
    def trajectory_ids(self) -> tuple[str, ...]:
        return tuple(f"{self.prompt.prompt_id}#{sibling}" for sibling in self.siblings)

    def lean(self, *, with_media: bool) -> Answers:
        """Returns the answers without prompt tokens, unused by reward functions. `with_media` keeps the media."""
        media = self.prompt.media if with_media else ()
        prompt = replace(self.prompt, compact_ids=NO_IDS, expanded_ids=NO_IDS, media=media, media_spans=())
        return replace(self, prompt=prompt)


@dataclass(frozen=True)
class Reward:
    """One response's score. `components` holds each component's unweighted value by name."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Trajectory:
    """One sampled response with the arrays for training. `behavior_logprobs` belong to the sampled distribution (with
    temperature, banned ids and truncation). `action_mask` is False for steps that are not trained."""

    trajectory_id: str  # "<prompt_id>#<sibling>"
    actions: Actions
    behavior_logprobs: np.ndarray  # float32 [T]
    action_mask: np.ndarray  # bool [T]
    weight_spans: tuple[WeightSpan, ...]
    finish_reason: FinishReason
    response: Response

    def __post_init__(self) -> None:
        steps = self.actions.num_steps
        shapes = {self.behavior_logprobs.shape[0], self.action_mask.shape[0], steps}
        covered = sum(span.end - span.start for span in self.weight_spans)
        if len(shapes) != 1 or covered != steps:
            raise ValueError(
                f"trajectory {self.trajectory_id}: {steps} actions, {self.behavior_logprobs.shape[0]} log-probs, "
                f"{self.action_mask.shape[0]} mask entries and {covered} versioned steps: they must be equal"
            )

    @property
    def num_steps(self) -> int:
        return self.actions.num_steps

    @property
    def is_truncated(self) -> bool:
        return self.finish_reason in (FinishReason.LENGTH, FinishReason.TRUNCATED)

    @property
    def turn_media(self) -> list[tuple[MediaHandle, ...]]:
        """Returns for each turn of an episode the media of the observation after it."""
        turns, actions = self.response.turns, self.actions
        ends = [*(turn.start for turn in turns[1:]), self.num_steps][: len(turns)]
        shown = list(zip(actions.media, actions.media_spans, strict=True)) if turns else []
        return [
            tuple(handle for handle, span in shown if turn.end <= span.start < end)
            for turn, end in zip(turns, ends, strict=True)
        ]

    @property
    def weight_versions(self) -> np.ndarray:
        """int32 [T]: the version that sampled each step."""
        versions = np.empty(self.num_steps, dtype=np.int32)
        for span in self.weight_spans:
            versions[span.start : span.end] = span.version
        return versions


@dataclass(frozen=True)
class TrajectoryGroup:
    """The siblings of one prompt: the unit of admission, scoring, filtering and credit assignment."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]

    @property
    def group_id(self) -> str:
        return self.prompt.prompt_id

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles column by column; small arrays of siblings are concatenated (`actions.packed`)."""
        siblings = self.trajectories
        if not siblings:
            return TrajectoryGroup, (self.prompt, ())
        rest = [
            (
                t.trajectory_id,
                [(span.version, span.start, span.end) for span in t.weight_spans],
                t.finish_reason.value,
                t.response,
            )
            for t in siblings
        ]
        kind = type(siblings[0].actions)
        actions = (kind, kind.packed([t.actions for t in siblings]))
        logprobs = packed([t.behavior_logprobs for t in siblings])
        masks = packed([t.action_mask for t in siblings])
        return _put_together, (self.prompt, [t.num_steps for t in siblings], actions, logprobs, masks, rest)

    def small_responses(self) -> tuple[Response, ...] | None:
        """Returns the responses if they are small enough to be sent by value in a message, else None."""
        responses = tuple(trajectory.response for trajectory in self.trajectories)
        num_characters = sum(
            len(response.text) + sum(len(turn.action) + len(turn.observation) for turn in response.turns)
            for response in responses
        )
        if num_characters > MAX_CHARACTERS_BY_VALUE or any(response.images for response in responses):
            return None
        return responses

    def summary(self) -> GroupSummary:
        """Returns the numbers that the driver keeps; the arrays stay in the object store."""
        tokens_by_version: dict[int, int] = {}
        for trajectory in self.trajectories:
            for span in trajectory.weight_spans:
                num_sampled = int(np.count_nonzero(trajectory.action_mask[span.start : span.end]))
                tokens_by_version[span.version] = tokens_by_version.get(span.version, 0) + num_sampled
        later = {handle.key: handle.num_bytes for t in self.trajectories for handle in t.actions.media}
        return GroupSummary(
            group_id=self.group_id,
            sample_id=self.prompt.sample_id,
            num_trajectories=len(self.trajectories),
            num_steps=tuple(t.num_steps for t in self.trajectories),
            num_prompt_tokens=self.prompt.num_tokens,
            num_media_tokens=sum(span.end - span.start for span in self.prompt.media_spans),
            num_tokens=sum(tokens_by_version.values()),
            num_truncated=sum(t.is_truncated for t in self.trajectories),
            tokens_by_version=tokens_by_version,
            media_keys=tuple(handle.key for handle in self.prompt.media),
            num_media_bytes=sum(handle.num_bytes for handle in self.prompt.media),
            num_bytes=group_num_bytes(self) + sum(later.values()),
            sha256=group_digest(self),
        )


def _put_together(
    prompt: Prompt,
    num_steps: Sequence[int],
    actions: tuple[type[Actions], Any],
    logprobs: Column,
    masks: Column,
    rest: Sequence[tuple[str, Sequence[tuple[int, int, int]], str, Response]],
) -> TrajectoryGroup:
    """Rebuilds a group from `TrajectoryGroup.__reduce__`, without the checks of the constructor."""
    kind, steps = actions
    columns = (kind.unpacked(steps, num_steps), unpacked(logprobs, num_steps), unpacked(masks, num_steps))
    trajectories = []
    for own, own_logprobs, mask, (trajectory_id, spans, finish_reason, response) in zip(*columns, rest, strict=True):
        trajectory = object.__new__(Trajectory)
        vars(trajectory).update(
            trajectory_id=trajectory_id,
            actions=own,
            behavior_logprobs=own_logprobs,
            action_mask=mask,
            weight_spans=tuple(WeightSpan(*span) for span in spans),
            finish_reason=FinishReason(finish_reason),
            response=response,
        )
        trajectories.append(trajectory)
    return TrajectoryGroup(prompt, tuple(trajectories))


@dataclass(frozen=True)
class GroupSummary:
    """Metadata of one group, small enough for every message."""

    group_id: str
    sample_id: str
    num_trajectories: int
    num_steps: tuple[int, ...]  # T of each trajectory
    num_prompt_tokens: int
    num_media_tokens: int  # media placeholders among the prompt's tokens
    num_tokens: int  # sampled by the policy, all siblings
    num_truncated: int
    tokens_by_version: Mapping[int, int]
    media_keys: tuple[str, ...]
    num_media_bytes: int  # of the prompt's media, each counted once per group
    num_bytes: int  # of the group with media of later turns, without media of its prompt
    failures: Mapping[str, int] = field(default_factory=dict)  # failed episodes by kind, including earlier attempts
    sha256: str = ""  # of the content, see `group_digest`

    @property
    def oldest_version(self) -> int:
        return min(self.tokens_by_version)


# Report of an actor on a group: the summary, and the responses if they are small
GroupReport = tuple[GroupSummary, tuple[Response, ...] | None]


class Generated(NamedTuple):
    """A sampled group as received by the driver."""

    group: Any  # a reference to the `TrajectoryGroup`, or the value itself in one process
    summary: GroupSummary
    answers: Answers | None = None  # all responses, if they are small

    @classmethod
    def of(cls, prompt: Prompt, group: Any, report: GroupReport) -> Generated:
        """Builds the record from an actor's report on `group`."""
        summary, responses = report
        if responses is None:
            return cls(group, summary)
        return cls(group, summary, Answers(prompt, tuple(range(len(responses))), responses))

    @property
    def to_score(self) -> Any:
        """The input of a reward pool: the answers by value if there are any, else the group."""
        return self.group if self.answers is None else self.answers


@dataclass(frozen=True)
class ScoredGroup:
    """A finished group for the learner: reference to the arrays, and rewards.

    `cluster.runtime.object_store.fetch` resolves `group` to a `TrajectoryGroup` (it is an object ref, or the value in
    one process) and `reference_logprobs`, once scored, to one float32 [T] array per trajectory. `rewards[i]` belongs to
    trajectory i; None: scoring failed, and the trajectory is not trained.
    """

    summary: GroupSummary
    group: Any
    rewards: tuple[Reward | None, ...]
    reference_logprobs: Any = None

    @property
    def scored_rewards(self) -> tuple[Reward, ...]:
        return tuple(reward for reward in self.rewards if reward is not None)

    @property
    def outcome(self) -> GroupOutcome:
        summary = self.summary
        return GroupOutcome(summary.group_id, self.scored_rewards, summary.num_trajectories, summary.num_tokens)


@dataclass(frozen=True)
class GroupOutcome:
    """What observers learn from a finished group; a prompt that could not be sampled has no responses."""

    group_id: str
    rewards: tuple[Reward, ...] = ()  # of the scored responses
    num_responses: int = 0
    num_tokens: int = 0  # sampled by the policy


def group_num_bytes(group: TrajectoryGroup) -> int:
    """Returns the bytes of a group's arrays, without media."""
    arrays: Sequence[np.ndarray] = [group.prompt.compact_ids, group.prompt.expanded_ids]
    per_trajectory = (
        t.actions.num_bytes + t.behavior_logprobs.nbytes + t.action_mask.nbytes for t in group.trajectories
    )
    return sum(a.nbytes for a in arrays) + sum(per_trajectory)
