"""Episode: tokens, images and turns of an episode in progress; ObservationBudget limits observations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mobula.actors.environments.base import IMAGE_MARK, IMAGE_PLACEHOLDER, Action, Observation, Step, checked_rewards
from mobula.actors.environments.bridge import TurnBridge
from mobula.actors.processors.chat import ChatProcessor
from mobula.cluster.records.actions import KeptSets, TokenActions
from mobula.cluster.records.media import MediaHandle, MediaSpan
from mobula.cluster.records.partial_response import SampledSequence, shifted
from mobula.cluster.records.trajectory import EpisodeTurn, FinishReason, Prompt, WeightSpan
from mobula.configs.schema.environment import EnvironmentConfig


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
    """Appends observations to episodes within `environment.max_tokens` and `sampler.max_images_per_prompt`.

    An observation must leave a token for the next turn.
    """

    def __init__(self, config: EnvironmentConfig, chat: ChatProcessor, *, model: str, max_images: int) -> None:
        """Raises `ValueError` if the chat template of `model` cannot be used for several turns."""
        self._max_tokens = config.max_tokens
        self._max_images = max_images
        self._eos_token_ids = chat.eos_token_ids
        self._bridge = TurnBridge(chat, model)

    def admit(self, episode: Episode, prompt: Prompt, observation: Observation) -> bool:
        """Appends the observation if it fits, and returns whether it does.

        A turn without an end token (cut at a limit or a stop string) gets one.

        Raises:
            EpisodeError: a text of the observation imitates special tokens, or an image cannot be used.
        """
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
