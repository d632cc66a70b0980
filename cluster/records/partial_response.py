"""Partial responses: chunks of a response that an engine sends while it samples, and their concatenation.

sequence.until(k).followed_by(sequence.since(k)) == sequence      for every k
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mobula.cluster.records.actions import Actions, TokenActions
from mobula.cluster.records.trajectory import FinishReason, Response, WeightSpan


@dataclass(frozen=True)
class PlayedTurn:
    """One answered turn of an episode. A replay of the turn must give the same observation."""

    num_tokens: int
    is_cut: bool  # at the length limit
    observation: str  # hash of the environment's answer


@dataclass(frozen=True, eq=False)
class SampledSequence:
    """One sampled response, or a part of it; `weight_spans` count from its first step.

    A step of a text model is a token, including a sampled EOS. `images` are the images of a visual model at the end,
    as in `Response`. In an episode the steps belong to `turns`; tokens between turns are left out.
    """

    actions: Actions  # T steps
    logprobs: np.ndarray  # float32 [T], of the sampled distribution
    weight_spans: tuple[WeightSpan, ...]  # cover [0, T)
    finish_reason: FinishReason | None  # None: more steps follow
    images: tuple[bytes, ...] = ()
    turns: tuple[PlayedTurn, ...] = ()

    def __post_init__(self) -> None:
        covered = sum(span.end - span.start for span in self.weight_spans)
        if not (self.num_tokens,) == self.logprobs.shape == (covered,):
            raise ValueError(
                f"{self.num_tokens} tokens, {self.logprobs.shape[0]} log-probs and {covered} versioned tokens: "
                "they must be equal"
            )

    @property
    def num_tokens(self) -> int:
        """Number of steps."""
        return self.actions.num_steps

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def followed_by(self, more: SampledSequence) -> SampledSequence:
        """Concatenates this part and the next one; adjacent spans of one version are merged."""
        if self.is_finished:
            raise ValueError(
                f"a response that ended ({self.finish_reason}) cannot go on: {more.num_tokens} more tokens"
            )
        if self.num_tokens == 0:
            return more
        return SampledSequence(
            self.actions.followed_by(more.actions),
            np.concatenate([self.logprobs, more.logprobs]),
            _joined(self.weight_spans, shifted(more.weight_spans, self.num_tokens)),
            more.finish_reason,
            more.images,
            (*self.turns, *more.turns),
        )

    def since(self, start: int) -> SampledSequence:
        """Returns the steps after the first `start` tokens. A part of an episode has no turns."""
        spans = shifted(clipped(self.weight_spans, start, self.num_tokens), -start)
        rest = self.actions.stretch(start, self.num_tokens)
        return SampledSequence(rest, self.logprobs[start:], spans, self.finish_reason, self.images)

    def until(self, end: int) -> SampledSequence:
        """Returns the first `end` tokens as an unfinished response."""
        spans = clipped(self.weight_spans, 0, end)
        return SampledSequence(self.actions.stretch(0, end), self.logprobs[:end], spans, None)


# An empty response, for steps of any kind
NOTHING = SampledSequence(TokenActions(np.empty(0, dtype=np.int32)), np.empty(0, dtype=np.float32), (), None)


@dataclass(frozen=True)
class TokenChunk:
    """The steps of one sibling since its last chunk."""

    request_id: str  # id of the attempt that sampled the chunk
    sibling: int
    start: int  # number of earlier tokens of the sibling
    tokens: SampledSequence
    response: Response | None = None  # the whole response as text, in the last chunk
    is_restart: bool = False  # the sibling was started again: earlier chunks are void


# Takes new chunks, and all siblings including them
Emit = Callable[[Sequence[TokenChunk], Sequence[SampledSequence]], None]


@dataclass(frozen=True)
class Attempt:
    """One attempt at a prompt: a unique id, and the tokens of each sibling from earlier attempts (may be empty)."""

    request_id: str
    siblings: tuple[SampledSequence, ...] = ()


def shifted(spans: Sequence[WeightSpan], by: int) -> tuple[WeightSpan, ...]:
    return tuple(WeightSpan(span.version, span.start + by, span.end + by) for span in spans)


def clipped(spans: Sequence[WeightSpan], start: int, end: int) -> tuple[WeightSpan, ...]:
    within = (WeightSpan(s.version, max(s.start, start), min(s.end, end)) for s in spans)
    return tuple(span for span in within if span.start < span.end)


def _joined(first: tuple[WeightSpan, ...], then: tuple[WeightSpan, ...]) -> tuple[WeightSpan, ...]:
    if first and then and first[-1].version == then[0].version:
        return (*first[:-1], WeightSpan(then[0].version, first[-1].start, then[0].end), *then[1:])
    return (*first, *then)
