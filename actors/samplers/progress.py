"""GroupProgress: the siblings of a prompt during sampling; StopStrings: ends responses."""

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
    """Ends a response with the token that completes a stop string; token ids are unchanged.

    Searches the whole text of a response, as reward functions read it, because a stop string may begin in an earlier
    attempt.
    """

    def __init__(self, model: str, strings: Sequence[str], hidden: Collection[int] = ()) -> None:
        """`model` is the checkpoint of the tokenizer, which is loaded only with `strings`. Ids in `hidden` are removed
        from the text.
        """
        self._model = model
        self._strings = tuple(strings)
        self._hidden = frozenset(hidden)

    @property
    def are_on(self) -> bool:
        return bool(self._strings)

    def cut(self, sequence: SampledSequence) -> SampledSequence:
        """Returns the response up to the token that completes a stop string; unchanged without a stop string."""
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
    return AutoTokenizer.from_pretrained(model, trust_remote_code=False)


class GroupProgress:
    """Collects tokens of siblings and reports them in chunks.

    When a sibling has `chunk_tokens` unreported tokens, the chunks of all siblings are reported together: one report
    per chunk, and a sibling loses at most `chunk_tokens - 1` tokens with its actor. The finished group is returned, not
    reported.
    """

    def __init__(
        self, attempt: Attempt, num_samples: int, chunk_tokens: int, emit: Emit, stop_strings: StopStrings
    ) -> None:
        self.siblings: list[SampledSequence] = list(attempt.siblings) or [NOTHING] * num_samples
        self.is_cancelled = False
        self._request_id = attempt.request_id
        self._chunk_tokens = chunk_tokens
        self._emit = emit
        self._stop_strings = stop_strings
        self._reported = list(self.siblings)

    def add(self, sibling: int, piece: SampledSequence) -> None:
        """Appends `piece` to `sibling`, without tokens after a stop string."""
        known = self.siblings[sibling]
        if not (known.is_finished and self._stop_strings.are_on):
            self.siblings[sibling] = self._stop_strings.cut(known.followed_by(piece))

    def unfinished(self) -> list[int]:
        """Returns the indices of siblings that have not ended."""
        return [index for index, sibling in enumerate(self.siblings) if not sibling.is_finished]

    def empty(self) -> list[int]:
        """Returns the indices of siblings without tokens."""
        return [index for index, sibling in enumerate(self.siblings) if sibling.num_tokens == 0]

    def aside(self, num_samples: int) -> GroupProgress:
        """Returns a progress of `num_samples` siblings without reports."""
        nothing = Attempt(self._request_id)
        return GroupProgress(
            nothing, num_samples, self._chunk_tokens, lambda chunks, siblings: None, self._stop_strings
        )

    def report(self) -> None:
        """Emits the new chunks of all siblings if a sibling has a full chunk."""
        if not self.unfinished():
            return
        if any(now.num_tokens - reported.num_tokens >= self._chunk_tokens for now, reported in self._pairs()):
            chunks = list(self._new_chunks())
            self._reported = list(self.siblings)
            self._emit(chunks, tuple(self.siblings))

    def finished(self) -> list[SampledSequence]:
        """Returns all siblings.

        Raises:
            RolloutError: a sibling has not ended.
        """
        if unfinished := self.unfinished():
            raise RolloutError(f"the engine ended request {self._request_id} without an end of siblings {unfinished}")
        return self.siblings

    def _pairs(self) -> Iterator[tuple[SampledSequence, SampledSequence]]:
        """Yields (current, last reported) of each sibling."""
        return zip(self.siblings, self._reported, strict=True)

    def _new_chunks(self) -> Iterator[TokenChunk]:
        for index, (sibling, reported) in enumerate(self._pairs()):
            if sibling is not reported:
                yield TokenChunk(self._request_id, index, reported.num_tokens, sibling.since(reported.num_tokens))


def first_token_settings(settings: SamplingSettings, num_samples: int) -> SamplingSettings:
    """Returns the settings for first tokens of `num_samples` siblings, with their separate temperature (FIRE)."""
    return replace(settings, num_samples=num_samples, temperature=settings.first_token_temperature, max_tokens=1)


def opened(first: SampledSequence, settings: SamplingSettings) -> SampledSequence:
    """Converts a separately sampled first token to the start of a response; an EOS ends the response."""
    goes_on = first.finish_reason is FinishReason.LENGTH and settings.max_tokens > 1
    return replace(first, finish_reason=None) if goes_on else first


def continued(prompt: Prompt, so_far: SampledSequence) -> Prompt:
    """Appends the first tokens of a response to a prompt; positions of media are unchanged."""
    assert isinstance(so_far.actions, TokenActions)
    return replace(prompt, expanded_ids=np.concatenate([prompt.expanded_ids, so_far.actions.token_ids]))


def settings_to_continue(settings: SamplingSettings, sibling: int, so_far: SampledSequence) -> SamplingSettings:
    """Returns the settings that sample one sibling from `so_far` on.

    An engine cannot resume a random generator, so the rest is a new draw from the same distribution. The seed depends
    on the position: the original seed would repeat the random numbers of the first tokens. Greedy decoding continues
    exactly.
    """
    seed = derived_seed(settings.seed, f"{sibling}/{so_far.num_tokens}")
    return replace(settings, num_samples=1, max_tokens=settings.max_tokens - so_far.num_tokens, seed=seed)
