"""EpisodeRunner: one prompt to a group of episodes, each of several turns with an environment between them."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from actors.environments.base import Action, EpisodeError, Observation, Step, checked_rewards, observation_hash
from actors.environments.bridge import TurnBridge
from actors.environments.hosts.pool import EnvironmentPool, Session
from actors.environments.rows import ENVIRONMENT
from actors.environments.tool_calls import parse_tool_calls
from actors.processors.chat import ChatProcessor
from actors.rollout.media_batcher import MediaBatcher
from actors.samplers.base import Sampler
from cluster.errors import EnvironmentFailedError, RolloutError
from cluster.records.actions import TokenActions
from cluster.records.media import MediaHandle, MediaSpan
from cluster.records.partial_response import Attempt, SampledSequence, shifted
from cluster.records.trajectory import (
    EpisodeTurn,
    FinishReason,
    Prompt,
    Response,
    Trajectory,
    TrajectoryGroup,
    WeightSpan,
)
from cluster.roles import SamplingSettings
from cluster.runtime.concurrency import run_all
from cluster.runtime.seeds import derived_seed
from configs.schema.environment import EnvironmentConfig

_logger = logging.getLogger(__name__)

NUM_WATCHED = 100  # episodes whose share of failures may end the run


@dataclass
class _Episode:
    """One episode as far as it has come. Every list and array is on the axis T, behind the prompt."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    weight_spans: list[WeightSpan] = field(default_factory=list)
    media: list[MediaHandle] = field(default_factory=list)
    media_spans: list[MediaSpan] = field(default_factory=list)
    turns: list[EpisodeTurn] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.ABORT
    failure: str = ""

    @property
    def num_steps(self) -> int:
        return len(self.token_ids)

    def add_turn(self, sampled: SampledSequence) -> None:
        assert isinstance(sampled.actions, TokenActions)
        self.weight_spans += shifted(sampled.weight_spans, self.num_steps)
        self.token_ids += sampled.actions.token_ids.tolist()
        self.logprobs += sampled.logprobs.tolist()
        self.mask += [True] * sampled.num_tokens

    def add_masked(self, ids: Sequence[int]) -> None:
        """Tokens that the policy did not sample: they have the version of the turn before."""
        if not len(ids):
            return
        last = self.weight_spans[-1]
        self.weight_spans[-1] = replace(last, end=last.end + len(ids))
        self.token_ids += list(ids)
        self.logprobs += [0.0] * len(ids)
        self.mask += [False] * len(ids)

    def prompt(self, start: Prompt, name: str) -> Prompt:
        """The prompt of the next turn: the exact tokens and media so far."""
        num = start.num_tokens
        spans = (MediaSpan(span.start + num, span.end + num) for span in self.media_spans)
        return replace(
            start,
            prompt_id=name,
            expanded_ids=np.concatenate([start.expanded_ids, np.array(self.token_ids, dtype=np.int32)]),
            media=(*start.media, *self.media),
            media_spans=(*start.media_spans, *spans),
        )


class EpisodeRunner:
    """Runs the siblings of a prompt side by side, each a request of its own for every turn.

    Tokens are never made of text again: the prompt of a turn is the ids of the one before, the ids that were sampled,
    and the ids of the observation (`TurnBridge`). An observation is admitted only if it fits into
    `environment.max_tokens` with room for a token of the next turn, and into `sampler.max_images_per_prompt`; else the
    episode is truncated behind the turn before.

    An episode whose environment fails is run again with the same seed, `environment.retries` times, and then has no
    reward. A rollout actor that is lost costs its episodes: they begin again elsewhere.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        chat: ChatProcessor,
        sampler: Sampler,
        media: MediaBatcher,
        *,
        model: str,
        max_images: int,
    ) -> None:
        """Raises: ValueError: the chat template of `model` cannot be used for several turns."""
        self._config = config
        self._chat = chat
        self._sampler = sampler
        self._media = media
        self._max_images = max_images
        self._bridge = TurnBridge(chat, model)
        self._pool = EnvironmentPool(config, takes_pictures=chat.takes_pictures)
        self._has_failed: deque[bool] = deque(maxlen=NUM_WATCHED)
        self.failures: Counter[str] = Counter()  # by kind, retried ones included

    async def generate(self, prompt: Prompt, settings: SamplingSettings, attempt: Attempt) -> TrajectoryGroup:
        """One episode a sibling.

        Raises:
            EnvironmentFailedError: the environment fails too often.
        """
        siblings = range(settings.num_samples)
        episodes = await run_all(*(self._tried(prompt, settings, attempt.request_id, n) for n in siblings))
        return TrajectoryGroup(prompt, tuple(self._trajectory(prompt, n, e) for n, e in enumerate(episodes)))

    def close(self) -> None:
        self._pool.close()

    async def _tried(self, prompt: Prompt, settings: SamplingSettings, request_id: str, sibling: int) -> _Episode:
        for number in range(self._config.retries + 1):
            episode = _Episode()
            name = f"{request_id}#{sibling}.{number}"
            try:
                async with self._pool.session() as session:
                    await self._run(episode, session, prompt, settings, name, sibling)
            except EpisodeError as error:
                self.failures[error.kind] += 1
                episode.failure = f"{error.kind}: {error}"
                _logger.warning("episode %s failed (%s): %s", name, error.kind, error)
            self._note(episode)
            if not episode.failure:
                break
        if not episode.token_ids:  # it failed before its first token; a trajectory has one
            episode.add_turn(await self._sampled(prompt, episode, settings, f"{name}/0", sibling, max_tokens=1))
        return episode

    async def _run(
        self,
        episode: _Episode,
        session: Session,
        prompt: Prompt,
        settings: SamplingSettings,
        name: str,
        sibling: int,
    ) -> None:
        """Raises: EpisodeError: the environment failed."""
        task = prompt.metadata[ENVIRONMENT]
        start = await session.reset(task["seed"])
        if observation_hash(start.observation) != task["hash"]:
            raise EpisodeError(
                "seed_ignored",
                f"environment {self._config.name} gave another observation for seed {task['seed']} than its prompt has",
            )
        for number in range(session.spec.max_turns):
            room = min(settings.max_tokens, self._config.max_tokens - episode.num_steps)
            begin = episode.num_steps
            sampled = await self._sampled(prompt, episode, settings, f"{name}/{number}", sibling, max_tokens=room)
            episode.add_turn(sampled)
            is_cut = sampled.finish_reason is FinishReason.LENGTH
            text = self._chat.decode(sampled.actions.token_ids)
            action = Action(text, parse_tool_calls(text, session.spec.tools), is_cut)
            step = await session.step(action)
            episode.turns.append(_turn(begin, episode.num_steps, action, step))
            if step.terminated:
                episode.finish_reason = FinishReason.TERMINATED
                return
            is_last = number + 1 == session.spec.max_turns
            if step.truncated or is_last or not self._admitted(episode, prompt, step.observation):
                episode.finish_reason = FinishReason.TRUNCATED
                return

    def _admitted(self, episode: _Episode, prompt: Prompt, observation: Observation) -> bool:
        """Append an observation to the episode if it fits; an observation that does not fit leaves nothing.

        A turn that did not end in a token of its own (a limit, a stop string) gets the one that ends a turn.
        """
        delta = self._bridge.delta(observation)
        is_open = episode.token_ids[-1] not in self._chat.eos_token_ids
        num_more = len(delta.ids) + is_open
        num_images = len(prompt.media) + len(episode.media) + len(delta.pictures)
        if episode.num_steps + num_more >= self._config.max_tokens or num_images > self._max_images:
            return False
        media = self._bridge.stored(delta)
        if is_open:
            episode.add_masked([self._bridge.end_id])
        offset = episode.num_steps
        episode.add_masked(delta.ids.tolist())
        episode.media += media
        episode.media_spans += [MediaSpan(span.start + offset, span.end + offset) for span in delta.spans]
        return True

    async def _sampled(
        self,
        prompt: Prompt,
        episode: _Episode,
        settings: SamplingSettings,
        name: str,
        sibling: int,
        *,
        max_tokens: int,
    ) -> SampledSequence:
        """The next turn of the policy. Later turns go before new prompts."""
        turn = len(episode.turns)
        so_far = episode.prompt(prompt, name)
        seed = derived_seed(settings.seed, f"{sibling}/{turn}")
        own = replace(
            settings, num_samples=1, max_tokens=max_tokens, seed=seed, priority=settings.priority - bool(turn)
        )
        with self._sampler.coming():
            media = await self._media.read(so_far.media)
        [sampled] = await self._sampler.sample(so_far, media, own, Attempt(name), lambda chunks, siblings: None)
        if sampled.finish_reason is FinishReason.ABORT:
            raise RolloutError(f"the engine aborted a turn of {name}")
        return sampled

    def _trajectory(self, prompt: Prompt, sibling: int, episode: _Episode) -> Trajectory:
        mask = np.array(episode.mask, dtype=bool)
        is_truncated = episode.finish_reason is FinishReason.TRUNCATED
        text = "\n".join(turn.action for turn in episode.turns)
        ids, media, spans = (
            np.array(episode.token_ids, dtype=np.int32),
            tuple(episode.media),
            tuple(episode.media_spans),
        )
        return Trajectory(
            trajectory_id=f"{prompt.prompt_id}#{sibling}",
            actions=TokenActions(ids, media=media, media_spans=spans),
            behavior_logprobs=np.array(episode.logprobs, dtype=np.float32),
            action_mask=mask,
            weight_spans=tuple(episode.weight_spans),
            finish_reason=episode.finish_reason,
            response=Response(text, int(mask.sum()), is_truncated, turns=tuple(episode.turns), failure=episode.failure),
        )

    def _note(self, episode: _Episode) -> None:
        """Raises: EnvironmentFailedError: too large a share of the last episodes failed."""
        self._has_failed.append(bool(episode.failure))
        share = sum(self._has_failed) / NUM_WATCHED
        if share > self._config.max_failed_fraction:
            kinds = ", ".join(f"{kind} {number}" for kind, number in self.failures.items())
            raise EnvironmentFailedError(
                f"{share:.0%} of the last {NUM_WATCHED} episodes of environment {self._config.name} failed ({kinds}), "
                f"environment.max_failed_fraction is {self._config.max_failed_fraction:g}: repair the environment; the "
                f"last one: {episode.failure}"
            )


def _turn(start: int, end: int, action: Action, step: Step) -> EpisodeTurn:
    observation = "\n".join(f"{message.role}: {message.text}" for message in step.observation)
    return EpisodeTurn(start, end, action.text, observation, checked_rewards(step.reward), action.status)
