"""StopStrings: where a response ends because of what its text says."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from mobula.actors.processors.text.special_tokens import decode_response
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.partial_response import SampledSequence
from mobula.cluster.records.trajectory import FinishReason


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
