"""EpisodeRunner: one prompt to a group of episodes, each of several turns with an environment between them."""

from __future__ import annotations

import logging
from collections import Counter, deque
from dataclasses import replace

import numpy as np

from actors.environments.base import Action, EpisodeError, observation_hash
from actors.environments.hosts.pool import EnvironmentPool, Session
from actors.environments.rows import ENVIRONMENT
from actors.environments.tool_calls import parse_tool_calls
from actors.processors.chat import ChatProcessor
from actors.rollout.episode import Admission, Episode
from actors.rollout.media_batcher import MediaBatcher
from actors.samplers.base import Sampler
from cluster.errors import EnvironmentFailedError, RolloutError
from cluster.records.partial_response import Attempt, SampledSequence
from cluster.records.trajectory import FinishReason, Prompt, Response, Trajectory, TrajectoryGroup
from cluster.roles import SamplingSettings
from cluster.runtime.concurrency import run_all
from cluster.runtime.seeds import derived_seed
from configs.schema.environment import EnvironmentConfig

_logger = logging.getLogger(__name__)

NUM_WATCHED = 100  # episodes whose share of failures may end the run


class EpisodeRunner:
    """Runs the siblings of a prompt side by side, each a request of its own for every turn.

    Tokens are never made of text again: the prompt of a turn is the ids of the one before, the ids that were sampled,
    and the ids of the observation (`TurnBridge`). An observation that does not fit (`Admission`) truncates the episode
    behind the turn before.

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
        self._admission = Admission(config, chat, model=model, max_images=max_images)
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

    async def _tried(self, prompt: Prompt, settings: SamplingSettings, request_id: str, sibling: int) -> Episode:
        for number in range(self._config.retries + 1):
            episode = Episode()
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
        episode: Episode,
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
            episode.note_step(begin, action, step)
            if step.terminated:
                episode.finish_reason = FinishReason.TERMINATED
                return
            is_last = number + 1 == session.spec.max_turns
            if step.truncated or is_last or not self._admission.admit(episode, prompt, step.observation):
                episode.finish_reason = FinishReason.TRUNCATED
                return

    async def _sampled(
        self,
        prompt: Prompt,
        episode: Episode,
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

    def _trajectory(self, prompt: Prompt, sibling: int, episode: Episode) -> Trajectory:
        mask = np.array(episode.mask, dtype=bool)
        is_truncated = episode.finish_reason is FinishReason.TRUNCATED
        text = "\n".join(turn.action for turn in episode.turns)
        return Trajectory(
            trajectory_id=f"{prompt.prompt_id}#{sibling}",
            actions=episode.actions,
            behavior_logprobs=np.array(episode.logprobs, dtype=np.float32),
            action_mask=mask,
            weight_spans=tuple(episode.weight_spans),
            finish_reason=episode.finish_reason,
            response=Response(text, int(mask.sum()), is_truncated, turns=tuple(episode.turns), failure=episode.failure),
        )

    def _note(self, episode: Episode) -> None:
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
