"""Episodes: turns of policy and environment, and the actor that plays them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from mobula.actors.environments.base import (
    IMAGE_MARK,
    IMAGE_PLACEHOLDER,
    Action,
    EpisodeError,
    Observation,
    Reset,
    Step,
    checked_rewards,
    observation_hash,
    parse_tool_calls,
)
from mobula.actors.environments.bridge import TurnBridge
from mobula.actors.environments.hosts.pool import EnvironmentPool, EnvironmentSession
from mobula.actors.environments.rows import ENVIRONMENT, row_options
from mobula.actors.processors.chat import ChatProcessor
from mobula.actors.rollout.actor import MediaBatcher, RolloutActor
from mobula.actors.rollout.controls import CONTROL, blank_image, controlled_observation
from mobula.actors.samplers.base import EngineSettings, Sampler
from mobula.cluster.errors import DatasetError, EnvironmentFailedError, RolloutError
from mobula.cluster.records.actions import KeptSets, TokenActions
from mobula.cluster.records.media import MediaHandle, MediaSpan, MediaStore, ProcessedMedia
from mobula.cluster.records.partial_response import NOTHING, Attempt, PlayedTurn, SampledSequence, TokenChunk, shifted
from mobula.cluster.records.trajectory import (
    EpisodeTurn,
    FinishReason,
    GroupReport,
    Prompt,
    Response,
    Trajectory,
    TrajectoryGroup,
    WeightSpan,
)
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.runtime.concurrency import run_all
from mobula.cluster.runtime.seeds import derived_seed
from mobula.configs.schema.data import DataConfig, EnvironmentConfig
from mobula.configs.schema.rollout import SamplerConfig
from mobula.configs.schema.run import Control

_logger = logging.getLogger(__name__)


@dataclass
class Episode:
    """An episode in progress. Lists of tokens have the axis T, which starts after the prompt."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)  # True on tokens of the policy
    weight_spans: list[WeightSpan] = field(default_factory=list)
    kept: KeptSets | None = None  # candidate tokens at each step; None: the whole vocabulary
    media: list[MediaHandle] = field(default_factory=list)
    media_spans: list[MediaSpan] = field(default_factory=list)
    turns: list[EpisodeTurn] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.ABORT
    failure: str = ""

    @property
    def num_steps(self) -> int:
        return len(self.token_ids)

    @property
    def actions(self) -> TokenActions:
        ids = np.array(self.token_ids, dtype=np.int32)
        return TokenActions(ids, self.kept, tuple(self.media), tuple(self.media_spans))

    def add_turn(self, sampled: SampledSequence) -> None:
        assert isinstance(sampled.actions, TokenActions)
        self._add_kept(sampled.actions.kept, sampled.num_tokens)
        self.weight_spans += shifted(sampled.weight_spans, self.num_steps)
        self.token_ids += sampled.actions.token_ids.tolist()
        self.logprobs += sampled.logprobs.tolist()
        self.mask += [True] * sampled.num_tokens

    def add_masked(self, ids: Sequence[int]) -> None:
        """Appends tokens that the policy did not write, with the version of the previous turn."""
        if not len(ids):
            return
        self._add_kept(None, len(ids))
        last = self.weight_spans[-1]
        self.weight_spans[-1] = replace(last, end=last.end + len(ids))
        self.token_ids += list(ids)
        self.logprobs += [0.0] * len(ids)
        self.mask += [False] * len(ids)

    def _add_kept(self, more: KeptSets | None, num_steps: int) -> None:
        if self.kept is None and more is None:
            return
        before = KeptSets.uncut(self.num_steps) if self.kept is None else self.kept
        self.kept = before.followed_by(KeptSets.uncut(num_steps) if more is None else more)

    def note_step(self, begin: int, action: Action, step: Step) -> None:
        """Records the outcome of the turn that began at `begin`."""
        observation = "\n".join(f"{m.role}: {m.text.replace(IMAGE_MARK, IMAGE_PLACEHOLDER)}" for m in step.observation)
        rewards = checked_rewards(step.reward)
        self.turns.append(EpisodeTurn(begin, self.num_steps, action.text, observation, rewards, action.status))

    def prompt(self, start: Prompt, name: str) -> Prompt:
        """Builds the prompt of the next turn from the exact tokens and media so far."""
        num = start.num_tokens
        spans = (MediaSpan(span.start + num, span.end + num) for span in self.media_spans)
        return replace(
            start,
            prompt_id=name,
            expanded_ids=np.concatenate([start.expanded_ids, np.array(self.token_ids, dtype=np.int32)]),
            media=(*start.media, *self.media),
            media_spans=(*start.media_spans, *spans),
        )


class ObservationBudget:
    """Appends observations to episodes within `environment.max_tokens` and `sampler.max_images_per_prompt`. An
    observation must leave a token for the next turn."""

    def __init__(self, config: EnvironmentConfig, chat: ChatProcessor, *, model: str, max_images: int) -> None:
        """Raises `ValueError` if the chat template of `model` cannot be used for several turns."""
        self._max_tokens = config.max_tokens
        self._max_images = max_images
        self._eos_token_ids = chat.eos_token_ids
        self._bridge = TurnBridge(chat, model)

    def admit(self, episode: Episode, prompt: Prompt, observation: Observation) -> bool:
        """Appends the observation if it fits, and returns whether it does. A turn without an end token gets one."""
        delta = self._bridge.delta(observation)
        is_open = episode.token_ids[-1] not in self._eos_token_ids
        num_more = len(delta.ids) + is_open
        num_images = len(prompt.media) + len(episode.media) + len(delta.images)
        if episode.num_steps + num_more >= self._max_tokens or num_images > self._max_images:
            return False
        media = self._bridge.stored(delta)
        if is_open:
            episode.add_masked([self._bridge.end_id])
        offset = episode.num_steps
        episode.add_masked(delta.ids.tolist())
        episode.media += media
        episode.media_spans += [MediaSpan(span.start + offset, span.end + offset) for span in delta.spans]
        return True


async def _started(session: EnvironmentSession, prompt: Prompt, read: Callable[..., Awaitable[Any]]) -> Reset:
    """Starts an episode with the seed of the prompt, or on its row; `read` fetches media."""
    if session.spec.plays_rows:
        return await session.reset(0, row_options(prompt, await read(prompt.media)))
    task = prompt.metadata[ENVIRONMENT]
    return await session.reset(task["seed"], task["options"])


NUM_WATCHED = 100  # episodes whose share of failures may end the run
Report = Callable[[Sequence[TokenChunk]], None]
Read = Callable[[Sequence[MediaHandle]], Sequence[ProcessedMedia]]


@dataclass(frozen=True)
class _Request:
    prompt: Prompt
    settings: SamplingSettings
    request_id: str
    sibling: int
    played: SampledSequence  # turns of an earlier attempt
    report: Report
    note_failure: Callable[[str], None]


class _TurnReport:
    """Provides turns of an earlier attempt, and reports new turns."""

    def __init__(self, request: _Request, played: SampledSequence, *, is_restart: bool) -> None:
        """With `is_restart` the episode restarts, and earlier reports of it become invalid."""
        self._request = request
        self._played = played
        self._num_reported = played.num_tokens
        self._is_restart = is_restart

    def begin_again(self) -> None:
        self._is_restart = self._is_restart or bool(self._played.turns)
        self._played, self._num_reported = NOTHING, 0

    def known(self, number: int) -> SampledSequence | None:
        if number >= len(self._played.turns):
            return None
        start = sum(turn.num_tokens for turn in self._played.turns[:number])
        turn = self._played.turns[number]
        reason = FinishReason.LENGTH if turn.is_cut else FinishReason.STOP
        return replace(self._played.since(start).until(turn.num_tokens), finish_reason=reason)

    def add(
        self,
        number: int,
        sampled: SampledSequence,
        observation: str,
        finish_reason: FinishReason | None,
        response: Callable[[], Response],
    ) -> None:
        """Reports an answered turn. Raises: EpisodeError: a replayed turn was answered otherwise than before."""
        if number < len(self._played.turns):
            if observation != self._played.turns[number].observation:
                raise EpisodeError(
                    "replay_differs",
                    f"turn {number + 1} was answered in another way when it was played again: set is_deterministic of "
                    "the environment's spec to False",
                )
            return
        turn = PlayedTurn(sampled.num_tokens, sampled.finish_reason is FinishReason.LENGTH, observation)
        tokens = replace(sampled, finish_reason=finish_reason, turns=(turn,))
        ended, request = None if finish_reason is None else response(), self._request
        chunk = TokenChunk(request.request_id, request.sibling, self._num_reported, tokens, ended, self._is_restart)
        request.report([chunk])
        self._num_reported += sampled.num_tokens
        self._is_restart = False


@dataclass(eq=False)
class EpisodeRunner:
    """Plays the siblings of a prompt concurrently, with a separate request for each turn.

    Text is never tokenised again: the prompt of a turn is the ids of the previous prompt, the sampled ids and the ids
    of the observation (`TurnBridge`). An observation that does not fit (`ObservationBudget`) truncates the episode
    after the previous turn.

    If the environment fails, the episode is played again with the same seed, up to `environment.retries` times, and
    then has no reward. After the loss of a rollout actor an episode continues from the reported turns: the environment
    is reset with the same seed, gets the same actions and must give the same answers. If it does not, or is not
    deterministic, the episode restarts.
    """

    config: EnvironmentConfig
    chat: ChatProcessor
    sampler: Sampler
    media: MediaBatcher
    _: KW_ONLY
    model: str
    max_images: int

    def __post_init__(self) -> None:
        """Raises `ValueError` if the chat template of `model` cannot be used for several turns."""
        self._budget = ObservationBudget(self.config, self.chat, model=self.model, max_images=self.max_images)
        self._pool = EnvironmentPool(self.config, takes_images=self.chat.takes_images)
        self._has_failed: deque[bool] = deque(maxlen=NUM_WATCHED)
        self.failures: Counter[str] = Counter()  # by kind, including retried episodes

    async def generate(
        self,
        prompt: Prompt,
        settings: SamplingSettings,
        attempt: Attempt,
        *,
        report: Report = lambda chunks: None,
        note_failure: Callable[[str], None] = lambda kind: None,
    ) -> TrajectoryGroup:
        """Plays one episode per sibling. Calls `report` with each answered turn and `note_failure` with the kind of
        each failure, including retried ones."""
        known = attempt.siblings or (NOTHING,) * settings.num_samples
        requests = [
            _Request(prompt, settings, attempt.request_id, n, played, report, note_failure)
            for n, played in enumerate(known)
        ]
        episodes = await run_all(*map(self._tried, requests))
        return TrajectoryGroup(prompt, tuple(self._trajectory(prompt, n, e) for n, e in enumerate(episodes)))

    def close(self) -> None:
        self._pool.close()

    async def _tried(self, request: _Request) -> Episode:
        played, number, is_restart = request.played, 0, False
        while True:
            episode = Episode()
            turns = _TurnReport(request, played, is_restart=is_restart)
            name = f"{request.request_id}#{request.sibling}.{number}"
            try:
                show = await self._control(request.prompt)
                async with self._pool.session() as session:
                    await self._run(episode, session, request, turns, name, show)
            except EpisodeError as error:
                self.failures[error.kind] += 1
                request.note_failure(error.kind)
                episode.failure = f"{error.kind}: {error}"
                _logger.warning("episode %s failed (%s): %s", name, error.kind, error)
            was_replayed = bool(played.turns)
            played, is_restart = NOTHING, True
            if not was_replayed or not episode.failure:  # a failed replay does not count as a try
                self._note(episode)
                number += 1
            if not episode.failure or number > self.config.retries:
                break
        if not episode.token_ids:  # failed before the first token, and a trajectory needs one
            episode.add_turn(await self._sampled(episode, request, f"{name}/0", max_tokens=1))
        return episode

    async def _control(self, prompt: Prompt) -> Callable[[Observation], Observation] | None:
        """Returns what a control of an evaluation shows in place of an observation; None for other prompts."""
        control = prompt.metadata[ENVIRONMENT].get(CONTROL)
        if control is None or control["name"] == Control.NO_IMAGE:
            return None if control is None else partial(controlled_observation, change=None)
        if control["name"] == Control.BLANK_IMAGE:
            return partial(controlled_observation, change=blank_image)
        async with self._pool.session() as session:  # before the episode's own: one slot at a time
            start = await session.reset(control["seed"], control["options"])
        first = next(image for message in start.observation for image in message.images)
        return partial(controlled_observation, change=lambda _: first)

    async def _run(
        self,
        episode: Episode,
        session: EnvironmentSession,
        request: _Request,
        turns: _TurnReport,
        name: str,
        show: Callable[[Observation], Observation] | None,
    ) -> None:
        """Replays the turns of an earlier attempt, then samples further turns; an `EpisodeError` ends the episode."""
        task = request.prompt.metadata[ENVIRONMENT]
        start = await _started(session, request.prompt, self.media.read)
        if task and observation_hash(start.observation) != task["hash"]:
            raise EpisodeError(
                "seed_ignored",
                f"environment {self.config.name} gave another observation for seed {task['seed']} than its prompt has",
            )
        if not session.spec.is_deterministic:
            turns.begin_again()
        for number in range(session.spec.max_turns):
            begin = episode.num_steps
            sampled = turns.known(number)
            if sampled is None:
                room = min(request.settings.max_tokens, self.config.max_tokens - begin)
                sampled = await self._sampled(episode, request, f"{name}/{number}", max_tokens=room)
            episode.add_turn(sampled)
            is_cut = sampled.finish_reason is FinishReason.LENGTH
            assert isinstance(sampled.actions, TokenActions)
            text = self.chat.decode(sampled.actions.token_ids)
            action = Action(text, parse_tool_calls(text, session.spec.tools), is_cut)
            step = await session.step(action)
            if show is not None:
                step = step._replace(observation=show(step.observation))
            episode.note_step(begin, action, step)
            is_last = number + 1 == session.spec.max_turns
            if step.terminated:
                episode.finish_reason = FinishReason.TERMINATED
            elif step.truncated or is_last or not self._budget.admit(episode, request.prompt, step.observation):
                episode.finish_reason = FinishReason.TRUNCATED
            is_over = episode.finish_reason is not FinishReason.ABORT
            ended = episode.finish_reason if is_over else None
            response = partial(self._response, request.prompt, episode)
            turns.add(number, sampled, observation_hash(step.observation), ended, response)
            if is_over:
                return

    async def _sampled(self, episode: Episode, request: _Request, name: str, *, max_tokens: int) -> SampledSequence:
        """Samples the next turn of the policy. Later turns have priority over new prompts."""
        settings, turn = request.settings, len(episode.turns)
        so_far = episode.prompt(request.prompt, name)
        seed = derived_seed(settings.seed, f"{request.sibling}/{turn}")
        own = replace(
            settings, num_samples=1, max_tokens=max_tokens, seed=seed, priority=settings.priority - bool(turn)
        )
        with self.sampler.coming():
            media = await self.media.read(so_far.media)
        [sampled] = await self.sampler.sample(so_far, media, own, Attempt(name), lambda chunks, siblings: None)
        if sampled.finish_reason is FinishReason.ABORT:
            raise RolloutError(f"the engine aborted a turn of {name}")
        return sampled

    def _response(self, prompt: Prompt, episode: Episode) -> Response:
        """The text is that of all turns; of a row's episode that of the last one, the answer."""
        turns = episode.turns if prompt.metadata[ENVIRONMENT] else episode.turns[-1:]
        text = "\n".join(turn.action for turn in turns)
        is_truncated = episode.finish_reason is FinishReason.TRUNCATED
        return Response(text, sum(episode.mask), is_truncated, turns=tuple(episode.turns), failure=episode.failure)

    def _trajectory(self, prompt: Prompt, sibling: int, episode: Episode) -> Trajectory:
        return Trajectory(
            trajectory_id=f"{prompt.prompt_id}#{sibling}",
            actions=episode.actions,
            behavior_logprobs=np.array(episode.logprobs, dtype=np.float32),
            action_mask=np.array(episode.mask, dtype=bool),
            weight_spans=tuple(episode.weight_spans),
            finish_reason=episode.finish_reason,
            response=self._response(prompt, episode),
        )

    def _note(self, episode: Episode) -> None:
        """Records the result. Raises `EnvironmentFailedError` if too large a share of recent episodes failed."""
        self._has_failed.append(bool(episode.failure))
        share = sum(self._has_failed) / NUM_WATCHED
        if share > self.config.max_failed_fraction:
            kinds = ", ".join(f"{kind} {number}" for kind, number in self.failures.items())
            raise EnvironmentFailedError(
                f"{share:.0%} of the last {NUM_WATCHED} episodes of environment {self.config.name} failed ({kinds}), "
                f"environment.max_failed_fraction is {self.config.max_failed_fraction:g}: repair the environment; the "
                f"last one: {episode.failure}"
            )


@dataclass(frozen=True)
class EpisodeSettings:
    """Settings of episodes, in addition to the engine's; equal for all actors of a run."""

    environment: EnvironmentConfig
    data: DataConfig
    keeps_files: bool  # of images, for reward functions


class EpisodeActor(RolloutActor):
    """Samples episodes. A group contains each image of its observations once: objects of an actor in the object store
    are lost with it."""

    def __init__(
        self, sampler: str, settings: EngineSettings, episodes: EpisodeSettings, *, object_timeout_s: float
    ) -> None:
        super().__init__(sampler, settings, object_timeout_s=object_timeout_s)
        store = MediaStore(lambda media: media, episodes.data.media_cache_bytes)
        chat = ChatProcessor(
            settings.model,
            episodes.data,
            settings.sampler,
            store,
            keep_files=episodes.keeps_files,
            device=settings.device,
        )
        self._episodes = EpisodeRunner(
            episodes.environment,
            chat,
            self._sampler,
            self._media,
            model=settings.model,
            max_images=settings.sampler.max_images_per_prompt,
        )

    async def generate(
        self, prompt: Prompt, settings: SamplingSettings, attempt: Attempt
    ) -> tuple[TrajectoryGroup, GroupReport]:
        failures: Counter[str] = Counter()
        group = await self._episodes.generate(
            prompt, settings, attempt, report=self.report, note_failure=lambda kind: failures.update([kind])
        )
        return group, (replace(group.summary(), failures=dict(failures)), group.small_responses())

    async def close(self) -> None:
        await asyncio.to_thread(self._episodes.close)
        await super().close()


@dataclass(frozen=True)
class Demonstration:
    """Tokens of a demonstrated episode after the prompt; `mask` is True on the tokens of turns."""

    actions: TokenActions
    mask: np.ndarray  # bool [T]


class Demonstrations:
    """Demonstrated episodes, cached, with the tokenisation of sampled episodes. An environment without
    demonstrations gives one turn: the `solution` of the reset."""

    def __init__(
        self, config: EnvironmentConfig, sampler: SamplerConfig, chat: ChatProcessor, *, model: str, read: Read
    ) -> None:
        """Raises `ValueError` if the chat template of `model` cannot be used for several turns."""
        self._config = config
        self._max_turn_tokens = sampler.max_tokens
        self._chat = chat
        self._budget = ObservationBudget(config, chat, model=model, max_images=sampler.max_images_per_prompt)
        self._pool = EnvironmentPool(config, takes_images=chat.takes_images)
        self._read = lambda handles: asyncio.to_thread(read, handles)
        self._made: dict[Hashable, Demonstration] = {}

    async def of(self, prompt: Prompt) -> Demonstration:
        """Returns the demonstrated episode of the prompt."""
        key = (prompt.sample_id, prompt.text, prompt.references, prompt.media)  # an id may be in several splits
        if key not in self._made:
            try:
                async with self._pool.session() as session:
                    self._made[key] = await self._demonstrated(prompt, session)
            except EpisodeError as error:
                raise DatasetError(
                    f"environment.name={self._config.name} cannot demonstrate {prompt.sample_id} ({error.kind}): "
                    f"{error}"
                ) from error
        return self._made[key]

    def close(self) -> None:
        self._pool.close()

    async def _demonstrated(self, prompt: Prompt, session: EnvironmentSession) -> Demonstration:
        start, episode = await _started(session, prompt, self._read), Episode()
        if not session.spec.demonstrates:
            self._add(episode, str(start.info.get("solution", "")))
            return Demonstration(episode.actions, np.array(episode.mask))
        for _ in range(session.spec.max_turns):
            text = await session.demonstrate()
            begin = episode.num_steps
            self._add(episode, text)
            action = Action(text, parse_tool_calls(text, session.spec.tools))
            step = await session.step(action)
            episode.note_step(begin, action, step)
            if step.terminated or step.truncated or not self._budget.admit(episode, prompt, step.observation):
                break
        last = episode.turns[-1]
        return Demonstration(episode.actions.stretch(0, last.end), np.array(episode.mask[: last.end]))

    def _add(self, episode: Episode, text: str) -> None:
        if not text:
            raise DatasetError(
                f"environment.name={self._config.name} demonstrates nothing, and its reset gives no `solution`: "
                "set warm_start=none, or give it one of both"
            )
        ids = self._chat.encode_answer(text)
        if len(ids) > self._max_turn_tokens:
            raise DatasetError(
                f"a demonstrated turn of environment.name={self._config.name} has {len(ids)} tokens ({text[:60]!r}), "
                f"sampler.max_tokens is {self._max_turn_tokens}: set sampler.max_tokens={len(ids)} or more"
            )
        nothing = np.zeros(len(ids), dtype=np.float32)
        episode.add_turn(SampledSequence(TokenActions(ids), nothing, (WeightSpan(0, 0, len(ids)),), FinishReason.STOP))
