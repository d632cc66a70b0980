"""Partial responses: the chunks that an engine has sampled so far, how they are sent, and how they are joined.

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
    """One turn of an episode that its environment has answered: playing it again must give the same observation."""

    num_tokens: int
    is_cut: bool  # at the length limit
    observation: str  # a hash of what the environment answered


@dataclass(frozen=True, eq=False)
class SampledSequence:
    """One response as the engine sampled it, or a stretch of it; `weight_spans` count from its own first step.

    A step of a text model is a token, and EOS is one if the policy sampled it. `pictures` are what a visual model shows
    at its end, as in `Response`. Of an episode the steps are those of its `turns`, without what stands between them.
    """

    actions: Actions  # T steps
    logprobs: np.ndarray  # float32 [T], of the distribution that was sampled from
    weight_spans: tuple[WeightSpan, ...]  # cover [0, T)
    finish_reason: FinishReason | None  # None: more steps follow
    pictures: tuple[bytes, ...] = ()
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
        """How many steps it has."""
        return self.actions.num_steps

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def followed_by(self, more: SampledSequence) -> SampledSequence:
        """This stretch and the next one as one; spans of one version that meet become one."""
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
            more.pictures,
            (*self.turns, *more.turns),
        )

    def since(self, start: int) -> SampledSequence:
        """The steps after the first `start` tokens; a stretch of an episode has no turns."""
        spans = shifted(clipped(self.weight_spans, start, self.num_tokens), -start)
        rest = self.actions.stretch(start, self.num_tokens)
        return SampledSequence(rest, self.logprobs[start:], spans, self.finish_reason, self.pictures)

    def until(self, end: int) -> SampledSequence:
        """The first `end` tokens, as if no more were known."""
        spans = clipped(self.weight_spans, 0, end)
        return SampledSequence(self.actions.stretch(0, end), self.logprobs[:end], spans, None)


NOTHING = SampledSequence(TokenActions(np.empty(0, dtype=np.int32)), np.empty(0, dtype=np.float32), (), None)
"""The beginning of a response, for steps of any kind."""


@dataclass(frozen=True)
class TokenChunk:
    """A chunk of one sibling: what it has sampled since its last chunk."""

    request_id: str  # of the attempt that sampled it
    sibling: int
    start: int  # how many tokens of the sibling come before
    tokens: SampledSequence
    response: Response | None = None  # all of it as text, with the chunk that ends it
    is_restart: bool = False  # what was known of the sibling counts no longer: it was begun again


Emit = Callable[[Sequence[TokenChunk], Sequence[SampledSequence]], None]
"""Takes new chunks, and all siblings as they are with them."""


@dataclass(frozen=True)
class Attempt:
    """One try at a prompt: an id that no other try has, and what earlier ones left of each sibling (empty: nothing)."""

    request_id: str
    siblings: tuple[SampledSequence, ...] = ()


def shifted(spans: Sequence[WeightSpan], by: int) -> tuple[WeightSpan, ...]:
    return tuple(WeightSpan(span.version, span.start + by, span.end + by) for span in spans)


def clipped(spans: Sequence[WeightSpan], start: int, end: int) -> tuple[WeightSpan, ...]:
    """The parts of `spans` that lie within [start, end)."""
    within = (WeightSpan(s.version, max(s.start, start), min(s.end, end)) for s in spans)
    return tuple(span for span in within if span.start < span.end)


def _joined(first: tuple[WeightSpan, ...], then: tuple[WeightSpan, ...]) -> tuple[WeightSpan, ...]:
    if first and then and first[-1].version == then[0].version:
        return (*first[:-1], WeightSpan(then[0].version, first[-1].start, then[0].end), *then[1:])
    return (*first, *then)
