"""Demonstrations: episodes with turns written by the environment, for a warm start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mobula.actors.environments.base import Action, EpisodeError, parse_tool_calls
from mobula.actors.environments.hosts.pool import EnvironmentPool, EnvironmentSession
from mobula.actors.environments.rows import ENVIRONMENT
from mobula.actors.processors.chat import ChatProcessor
from mobula.actors.rollout.episodes import Episode, ObservationBudget
from mobula.cluster.errors import DatasetError
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.partial_response import SampledSequence
from mobula.cluster.records.trajectory import FinishReason, Prompt, WeightSpan
from mobula.configs.schema.data import EnvironmentConfig
from mobula.configs.schema.rollout import SamplerConfig


@dataclass(frozen=True)
class Demonstration:
    """Tokens of a demonstrated episode after the prompt; `mask` is True on the tokens of turns."""

    actions: TokenActions
    mask: np.ndarray  # bool [T]


class Demonstrations:
    """Demonstrated episodes by seed, cached, with the tokenisation of sampled episodes. An environment without
    demonstrations gives one turn: the `solution` of the reset."""

    def __init__(self, config: EnvironmentConfig, sampler: SamplerConfig, chat: ChatProcessor, *, model: str) -> None:
        """Raises `ValueError` if the chat template of `model` cannot be used for several turns."""
        self._config = config
        self._max_turn_tokens = sampler.max_tokens
        self._chat = chat
        self._budget = ObservationBudget(config, chat, model=model, max_images=sampler.max_images_per_prompt)
        self._pool = EnvironmentPool(config, takes_images=chat.takes_images)
        self._made: dict[int, Demonstration] = {}

    async def of(self, prompt: Prompt) -> Demonstration:
        """Returns the demonstrated episode of the prompt's seed."""
        task = prompt.metadata[ENVIRONMENT]
        seed = task["seed"]
        if seed not in self._made:
            try:
                async with self._pool.session() as session:
                    self._made[seed] = await self._demonstrated(prompt, session, task)
            except EpisodeError as error:
                raise DatasetError(
                    f"environment.name={self._config.name} cannot demonstrate seed {seed} ({error.kind}): {error}"
                ) from error
        return self._made[seed]

    def close(self) -> None:
        self._pool.close()

    async def _demonstrated(
        self, prompt: Prompt, session: EnvironmentSession, task: Mapping[str, Any]
    ) -> Demonstration:
        start = await session.reset(task["seed"], task["options"])
        episode = Episode()
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
        span = (WeightSpan(0, 0, len(ids)),)
        episode.add_turn(SampledSequence(TokenActions(ids), nothing, span, FinishReason.STOP))
