"""A policy without a cluster, and its conversations."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from mobula.actors.datasets.images import EncodedFile
from mobula.actors.datasets.rows import Row, Turn
from mobula.actors.environments.base import Action, Message, Step, observation_hash, row_text
from mobula.actors.processors.chat import ChatProcessor
from mobula.actors.rollout.episodes import Episode, ObservationBudget
from mobula.actors.samplers import build_sampler
from mobula.cluster.errors import MobulaError, PreflightError, PromptError
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.media import MediaReader
from mobula.cluster.records.partial_response import Attempt, SampledSequence
from mobula.cluster.records.trajectory import (
    FinishReason,
    Prompt,
    Response,
    Reward,
    ScoredGroup,
    Trajectory,
    TrajectoryGroup,
)
from mobula.cluster.replay.trajectory_log import IMAGES_FOLDER, TrajectoryLog
from mobula.cluster.roles import SamplingSettings
from mobula.configs.schema import RunConfig
from mobula.deploy.wiring.preparation import prepare_base, require_model
from mobula.deploy.wiring.roles import engine_settings

MEDIA_IN_MEMORY = 64


@dataclass(frozen=True)
class PolicyAnswer:
    """`is_continued`: the prompt is the exact tokens of an earlier call, and what followed."""

    prompt: Prompt
    sampled: SampledSequence
    text: str
    is_continued: bool = False

    @property
    def token_ids(self) -> list[int]:
        assert isinstance(self.sampled.actions, TokenActions)
        return self.sampled.actions.token_ids.tolist()


class LocalPolicy:
    """Renders whole conversations with the chat template and samples with the engine of `sampler.kind`."""

    def __init__(self, config: RunConfig, *, keep_files: bool = False) -> None:
        if config.sampler.is_flow:
            raise PreflightError("sampler=flow answers with images, not with text: use sampler=huggingface or vllm")
        require_model(config)
        prepared = prepare_base(config, lambda processed: processed, keep_files=keep_files)
        assert isinstance(prepared.processor, ChatProcessor), "flow models are refused above"
        self.config, self.chat = config, prepared.processor
        self._sampler = build_sampler(config.sampler.kind, engine_settings(prepared, 0))
        self._media = MediaReader(timeout_s=config.timeouts.object_s, max_items=MEDIA_IN_MEMORY)
        self._num_asked = 0

    async def start(self) -> None:
        await self._sampler.start()

    async def close(self) -> None:
        await self._sampler.close()

    def prompt(self, messages: Sequence[Message], name: str) -> Prompt:
        """The conversation as a prompt; its last message is put as the user's."""
        *history, question = messages
        images = [image for message in messages for image in message.images]
        row = Row(
            sample_id=name,
            question=row_text(question),
            answer="",
            solution="",
            images=tuple(EncodedFile(content, f"{name}, image {n}") for n, content in enumerate(images, 1)),
            history=tuple(Turn(message.role, row_text(message)) for message in history),
        )
        return self.chat.prepare(row, name)

    async def sample(self, prompt: Prompt, settings: SamplingSettings) -> PolicyAnswer:
        self._num_asked += 1
        media = self._media.read(prompt.media)
        with self._sampler.coming():
            [sampled] = await self._sampler.sample(
                prompt, media, settings, Attempt(f"{prompt.prompt_id}/{self._num_asked}"), lambda chunks, siblings: None
            )
        assert isinstance(sampled.actions, TokenActions)
        return PolicyAnswer(prompt, sampled, self.chat.decode(sampled.actions.token_ids))

    async def answer(self, messages: Sequence[Message], settings: SamplingSettings) -> PolicyAnswer:
        return await self.sample(self.prompt(messages, f"conversation-{self._num_asked}"), settings)


ASSISTANT = "assistant"
TIMEOUT_S = 60.0  # of the log's fetch, which finds everything in this process


class UnknownSessionError(MobulaError):
    """No session of this name is open."""


@dataclass
class _Branch:
    """A conversation up to an answer. `is_leaf` until a later call continues it."""

    start: Prompt
    episode: Episode
    is_leaf: bool = True


@dataclass
class _Session:
    task: str
    branches: dict[str, _Branch] = field(default_factory=dict)  # by the hash of the messages, answer included


class Conversations:
    """Answers calls, and makes trajectories of sessions that end with a reward.

    A call whose messages are those of an earlier call of its session, its answer as it was given, and new messages is
    sampled behind the tokens of that call: nothing is tokenised again, and it becomes a later turn of one trajectory.
    Any other call begins a trajectory of its own. Sessions of one task that begin with the same tokens are siblings of
    one group, which is written to `trajectories/` below `folder` when there are `num_siblings`, and at the end. Its
    image files are written to `images/`, under their keys.
    """

    def __init__(self, policy: LocalPolicy, folder: Path | None, *, num_siblings: int) -> None:
        config = policy.config
        self._policy = policy
        self._budget = ObservationBudget(
            config.environment, policy.chat, model=config.policy.model, max_images=config.sampler.max_images_per_prompt
        )
        self._sessions: dict[str, _Session] = {}
        self._log = TrajectoryLog(folder / "trajectories", timeout_s=TIMEOUT_S) if folder is not None else None
        self._images = folder / IMAGES_FOLDER if folder is not None else None
        self._step = max(self._log.steps(), default=0) if self._log is not None else 0
        self._num_siblings = num_siblings
        self._waiting: dict[str, list[tuple[Prompt, Trajectory, Reward]]] = defaultdict(list)  # by group

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def open(self, session: str, task: str) -> None:
        """Raises: ValueError: it is open already."""
        if session in self._sessions:
            raise ValueError(f"session {session!r} is open already: take another name")
        self._sessions[session] = _Session(task)

    async def complete(
        self, session: str | None, messages: Sequence[Message], settings: SamplingSettings
    ) -> PolicyAnswer:
        """Answer the last message; without a session nothing is kept."""
        held = self._session(session) if session is not None else None
        branch = self._continued(held, messages) if held is not None else None
        is_continued = branch is not None
        if branch is None:
            branch = _Branch(self._policy.prompt(messages, f"{session or 'call'}/{_digest(messages)[:12]}"), Episode())
        prompt = branch.episode.prompt(branch.start, f"{branch.start.prompt_id}/{len(branch.episode.turns)}")
        answer = await self._policy.sample(prompt, settings)
        begin = branch.episode.num_steps
        branch.episode.add_turn(answer.sampled)
        branch.episode.note_step(begin, Action(answer.text), Step((), 0.0, False, False, {}))
        if held is not None:
            held.branches[_digest([*messages, Message(ASSISTANT, answer.text)])] = branch
        return replace(answer, is_continued=is_continued)

    def finish(self, session: str, reward: Reward | None) -> int:
        """End a session; the number of trajectories that came of it. Without a reward there are none."""
        held = self._session(session)
        del self._sessions[session]
        if reward is None:
            return 0
        leaves = [branch for branch in held.branches.values() if branch.is_leaf]
        for number, branch in enumerate(leaves):
            group = f"{held.task}/{_start_of(branch.start)}"
            self._waiting[group].append((branch.start, _trajectory(f"{session}#{number}", branch, reward), reward))
            if len(self._waiting[group]) >= self._num_siblings:
                self._write([group])
        return len(leaves)

    def close(self) -> None:
        """Write the groups that have fewer siblings than they were to have."""
        self._write(list(self._waiting))

    def _session(self, name: str) -> _Session:
        if name not in self._sessions:
            raise UnknownSessionError(f"there is no open session {name!r}: open it with POST /v1/sessions")
        return self._sessions[name]

    def _continued(self, held: _Session, messages: Sequence[Message]) -> _Branch | None:
        """A branch whose messages these continue, with the new ones appended; None if there is none."""
        answers = [index for index, message in enumerate(messages) if message.role == ASSISTANT]
        if not answers or answers[-1] + 1 == len(messages):
            return None
        before, after = messages[: answers[-1] + 1], tuple(messages[answers[-1] + 1 :])
        branch = held.branches.get(_digest(before))
        if branch is None:
            return None
        episode = _copied(branch.episode)
        if not self._budget.admit(episode, branch.start, after):
            raise PromptError(
                "the conversation is longer than environment.max_tokens behind its first prompt, or has more images "
                "than sampler.max_images_per_prompt: raise them, or begin another conversation"
            )
        branch.is_leaf = False
        return _Branch(branch.start, episode)

    def _write(self, groups: Sequence[str]) -> None:
        scored = []
        for name in groups:
            rows = self._waiting.pop(name)
            prompt = replace(rows[0][0], prompt_id=name)
            siblings = tuple(replace(row, trajectory_id=f"{name}#{n}") for n, (_, row, _) in enumerate(rows))
            group = TrajectoryGroup(prompt, siblings)
            scored.append(ScoredGroup(group.summary(), group, tuple(reward for _, _, reward in rows)))
        if scored and self._log is not None:
            self._write_images(scored)
            self._step += 1
            self._log.append(self._step, scored)

    def _write_images(self, groups: Sequence[ScoredGroup]) -> None:
        assert self._images is not None, "groups are written"
        self._images.mkdir(parents=True, exist_ok=True)
        for scored in groups:
            for trajectory in scored.group.trajectories:
                for handle in (*scored.group.prompt.media, *trajectory.actions.media):
                    if handle.reference.files and not (self._images / handle.key).exists():
                        (self._images / handle.key).write_bytes(handle.reference.files[0])


def _digest(messages: Sequence[Message]) -> str:
    return observation_hash(tuple(messages))


def _start_of(prompt: Prompt) -> str:
    """Equal for prompts of equal tokens and images."""
    keys = ",".join(handle.key for handle in prompt.media)
    return hashlib.sha256(prompt.expanded_ids.tobytes() + keys.encode()).hexdigest()[:16]


def _copied(episode: Episode) -> Episode:
    values = {part.name: getattr(episode, part.name) for part in fields(episode)}
    lists: dict[str, Any] = {name: [*value] for name, value in values.items() if isinstance(value, list)}
    return replace(episode, **lists)


def _trajectory(name: str, branch: _Branch, reward: Reward) -> Trajectory:
    episode = branch.episode
    turns = list(episode.turns)
    turns[-1] = replace(turns[-1], rewards=dict(reward.components) or {"reward": reward.value})
    mask = np.array(episode.mask, dtype=bool)
    text = "\n".join(turn.action for turn in turns)
    return Trajectory(
        trajectory_id=name,
        actions=episode.actions,
        behavior_logprobs=np.array(episode.logprobs, dtype=np.float32),
        action_mask=mask,
        weight_spans=tuple(episode.weight_spans),
        finish_reason=FinishReason.TERMINATED,
        response=Response(text, int(mask.sum()), False, turns=tuple(turns)),
    )
