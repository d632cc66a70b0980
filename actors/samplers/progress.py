"""GroupProgress: the siblings of one prompt while they are sampled, and StopStrings, which end them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from mobula.actors.processors.text.special_tokens import decode_response
from mobula.cluster.errors import RolloutError
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.partial_response import NOTHING, Attempt, Emit, SampledSequence, TokenChunk
from mobula.cluster.records.trajectory import FinishReason, Prompt
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.runtime.seeds import derived_seed


class StopStrings:
    """Ends a response with the token that completes a stop string; token ids stay as the engine sampled them.

    The whole text of a response is searched, as reward functions read it, so a stop string that began before an
    attempt was interrupted counts too.
    """

    def __init__(self, model: str, strings: Sequence[str], hidden: Collection[int] = ()) -> None:
        """`model` is the checkpoint whose tokenizer reads the responses; it is not read without `strings`. Ids of
        `hidden` are no part of a response's text.
        """
        self._model = model
        self._strings = tuple(strings)
        self._hidden = frozenset(hidden)

    @property
    def are_on(self) -> bool:
        return bool(self._strings)

    def cut(self, sequence: SampledSequence) -> SampledSequence:
        """The response up to the token with which some stop string is complete; itself where there is none."""
        if not self._strings:
            return sequence
        assert isinstance(sequence.actions, TokenActions), "only tokens have a text"
        ids = sequence.actions.token_ids
        if not self._has_one(ids):
            return sequence
        length = 1 + bisect_left(range(1, len(ids) + 1), True, key=lambda num: self._has_one(ids[:num]))
        return replace(sequence.until(length), finish_reason=FinishReason.STOP_STRING)

    def _has_one(self, ids: np.ndarray) -> bool:
        text = decode_response(_tokenizer(self._model), ids, self._hidden)
        return any(string in text for string in self._strings)


@cache
def _tokenizer(model: str) -> Any:
    return AutoTokenizer.from_pretrained(model)


class GroupProgress:
    """Puts pieces of siblings together and reports them in chunks.

    Whenever some sibling has `chunk_tokens` that were not reported, the chunks of all siblings go out together: so a
    sibling never has more than `chunk_tokens - 1` tokens that are on its actor alone, and siblings that run side by
    side cost one report. A finished group is not reported: it is returned.
    """

    def __init__(
        self, attempt: Attempt, num_samples: int, chunk_tokens: int, emit: Emit, stop_strings: StopStrings
    ) -> None:
        self.siblings: list[SampledSequence] = list(attempt.siblings) or [NOTHING] * num_samples
        self._request_id = attempt.request_id
        self._chunk_tokens = chunk_tokens
        self._emit = emit
        self._stop_strings = stop_strings
        self._reported = list(self.siblings)

    def add(self, sibling: int, piece: SampledSequence) -> None:
        """`piece` comes next in `sibling`. What an engine samples behind a stop string is left out."""
        known = self.siblings[sibling]
        if not (known.is_finished and self._stop_strings.are_on):
            self.siblings[sibling] = self._stop_strings.cut(known.followed_by(piece))

    def unfinished(self) -> list[int]:
        """Siblings that go on."""
        return [index for index, sibling in enumerate(self.siblings) if not sibling.is_finished]

    def empty(self) -> list[int]:
        """Siblings without a token."""
        return [index for index, sibling in enumerate(self.siblings) if sibling.num_tokens == 0]

    def aside(self, num_samples: int) -> GroupProgress:
        """A progress of `num_samples` siblings that are not reported."""
        nothing = Attempt(self._request_id)
        return GroupProgress(
            nothing, num_samples, self._chunk_tokens, lambda chunks, siblings: None, self._stop_strings
        )

    def report(self) -> None:
        """Emit the chunks if they are due."""
        if not self.unfinished():
            return
        if any(now.num_tokens - reported.num_tokens >= self._chunk_tokens for now, reported in self._pairs()):
            chunks = list(self._new_chunks())
            self._reported = list(self.siblings)
            self._emit(chunks, tuple(self.siblings))

    def finished(self) -> list[SampledSequence]:
        """All siblings, once each has ended.

        Raises:
            RolloutError: some sibling has not.
        """
        if unfinished := self.unfinished():
            raise RolloutError(f"the engine ended request {self._request_id} without an end of siblings {unfinished}")
        return self.siblings

    def _pairs(self) -> Iterator[tuple[SampledSequence, SampledSequence]]:
        """Each sibling as it is, and as it was reported last."""
        return zip(self.siblings, self._reported, strict=True)

    def _new_chunks(self) -> Iterator[TokenChunk]:
        for index, (sibling, reported) in enumerate(self._pairs()):
            if sibling is not reported:
                yield TokenChunk(self._request_id, index, reported.num_tokens, sibling.since(reported.num_tokens))


def first_token_settings(settings: SamplingSettings, num_samples: int) -> SamplingSettings:
    """How the first tokens of `num_samples` siblings are sampled where they have a temperature of their own (FIRE)."""
    return replace(settings, num_samples=num_samples, temperature=settings.first_token_temperature, max_tokens=1)


def opened(first: SampledSequence, settings: SamplingSettings) -> SampledSequence:
    """A first token that was sampled by itself, as the beginning of a response; an EOS ends the response."""
    goes_on = first.finish_reason is FinishReason.LENGTH and settings.max_tokens > 1
    return replace(first, finish_reason=None) if goes_on else first


def continued(prompt: Prompt, so_far: SampledSequence) -> Prompt:
    """The prompt with the first tokens of a response behind it; its media stay where they were."""
    assert isinstance(so_far.actions, TokenActions)
    return replace(prompt, expanded_ids=np.concatenate([prompt.expanded_ids, so_far.actions.token_ids]))


def settings_to_continue(settings: SamplingSettings, sibling: int, so_far: SampledSequence) -> SamplingSettings:
    """How one sibling is sampled from `so_far` on.

    An engine cannot take up a generator of random numbers in its middle, so the rest is another draw than it would have
    been, from the same distribution. Its seed depends on where it begins: the seed of the first tokens would repeat
    their random numbers. Greedy decoding goes on exactly.
    """
    seed = derived_seed(settings.seed, f"{sibling}/{so_far.num_tokens}")
    return replace(settings, num_samples=1, max_tokens=settings.max_tokens - so_far.num_tokens, seed=seed)
