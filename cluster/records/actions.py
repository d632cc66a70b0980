"""The actions of a trajectory, exactly as the engine sampled them. Only processor, sampler and policy read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from mobula.cluster.records.media import MediaHandle, MediaSpan

# One array of all siblings for transport: concatenated, or one array per sibling
Column = np.ndarray | list[np.ndarray]

MAX_BYTES_PACKED = 1 << 20  # of a column that is sent as one array


@dataclass(frozen=True, eq=False)
class KeptSets:
    """The set of tokens from which each step was sampled, if top-k, top-p or min-p truncate the distribution."""

    counts: np.ndarray  # int32 [T]; 0: the step was sampled from all tokens
    ids: np.ndarray  # int32 [sum of `counts`]: the concatenated sets

    @classmethod
    def of(cls, is_kept: np.ndarray) -> KeptSets:
        return cls(is_kept.sum(axis=1, dtype=np.int32), np.nonzero(is_kept)[1].astype(np.int32))

    @classmethod
    def uncut(cls, num_steps: int) -> KeptSets:
        """Returns empty sets for steps that were sampled from all tokens, or not sampled."""
        return cls(np.zeros(num_steps, dtype=np.int32), np.zeros(0, dtype=np.int32))

    def between(self, start: int, end: int) -> KeptSets:
        first, last = self.counts[:start].sum(), self.counts[:end].sum()
        return KeptSets(self.counts[start:end], self.ids[first:last])

    def followed_by(self, more: KeptSets) -> KeptSets:
        return KeptSets(np.concatenate([self.counts, more.counts]), np.concatenate([self.ids, more.ids]))


class CutColumn(NamedTuple):
    """The actions of siblings with `KeptSets`, for transport."""

    token_ids: Column
    counts: Column
    ids: Column


class MediaColumn(NamedTuple):
    """The actions of siblings with media of later turns, for transport."""

    tokens: Column | CutColumn
    media: list[tuple[tuple[MediaHandle, ...], tuple[MediaSpan, ...]]]


class Actions(Protocol):
    """T decision steps of one trajectory: tokens, or denoising steps."""

    @property
    def num_steps(self) -> int:
        """T"""

    @property
    def num_bytes(self) -> int:
        """Size of the arrays."""

    def content(self) -> Sequence[np.ndarray]:
        """Returns the arrays, for a digest."""

    def stretch(self, start: int, end: int) -> Self:
        """Returns the steps [start, end)."""

    def followed_by(self, more: Self) -> Self:
        """Returns these steps followed by `more`."""

    @property
    def media(self) -> tuple[MediaHandle, ...]:
        """Media of the environment's observations between the steps."""

    @property
    def media_spans(self) -> tuple[MediaSpan, ...]:
        """The steps that each of `media` fills."""

    @classmethod
    def packed(cls, siblings: Sequence[Self]) -> Any:
        """Packs the actions of all `siblings` for transport."""

    @classmethod
    def unpacked(cls, column: Any, num_steps: Sequence[int]) -> list[Self]:
        """Restores the siblings from `packed`; `num_steps` are their lengths."""


@dataclass(frozen=True)
class TokenActions:
    """The tokens after an expanded prompt: sampled tokens, and in an episode also the tokens between turns.

    `token_ids` are the engine's ids, never decoded and tokenised again. They follow the group's `Prompt.expanded_ids`.
    `media[i]` of an observation fills `media_spans[i]` of `token_ids`.
    """

    token_ids: np.ndarray  # int32 [T]
    kept: KeptSets | None = None  # None: each step was sampled from all tokens
    media: tuple[MediaHandle, ...] = ()
    media_spans: tuple[MediaSpan, ...] = ()

    @property
    def num_steps(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_bytes(self) -> int:
        kept = 0 if self.kept is None else self.kept.counts.nbytes + self.kept.ids.nbytes
        return self.token_ids.nbytes + kept

    def content(self) -> Sequence[np.ndarray]:
        ids = np.asarray(self.token_ids, dtype=np.int32)
        return (ids,) if self.kept is None else (ids, self.kept.counts, self.kept.ids)

    def stretch(self, start: int, end: int) -> TokenActions:
        """Returns the steps [start, end). Neither border may lie inside a medium."""
        kept = None if self.kept is None else self.kept.between(start, end)
        touched = [i for i, s in enumerate(self.media_spans) if s.start < end and s.end > start]
        spans = tuple(MediaSpan(self.media_spans[i].start - start, self.media_spans[i].end - start) for i in touched)
        if any(span.start < 0 or span.end > end - start for span in spans):
            raise ValueError(f"steps {start} to {end} cut one of the media at {self.media_spans}")
        return TokenActions(self.token_ids[start:end], kept, tuple(self.media[i] for i in touched), spans)

    def followed_by(self, more: TokenActions) -> TokenActions:
        kept = None if self.kept is None or more.kept is None else self.kept.followed_by(more.kept)
        spans = (MediaSpan(s.start + self.num_steps, s.end + self.num_steps) for s in more.media_spans)
        ids = np.concatenate([self.token_ids, more.token_ids])
        return TokenActions(ids, kept, (*self.media, *more.media), (*self.media_spans, *spans))

    @classmethod
    def packed(cls, siblings: Sequence[TokenActions]) -> Column | CutColumn | MediaColumn:
        """Packs int32 actions of all `siblings` for transport. Either all or none have kept sets."""
        ids = packed([actions.token_ids for actions in siblings])
        column: Column | CutColumn = ids
        kept = [actions.kept for actions in siblings if actions.kept is not None]
        if kept:
            assert len(kept) == len(siblings), "the siblings of one group are sampled in one way"
            column = CutColumn(ids, packed([sets.counts for sets in kept]), packed([sets.ids for sets in kept]))
        if any(actions.media for actions in siblings):
            return MediaColumn(column, [(actions.media, actions.media_spans) for actions in siblings])
        return column

    @classmethod
    def unpacked(cls, column: Column | CutColumn | MediaColumn, num_steps: Sequence[int]) -> list[TokenActions]:
        if isinstance(column, MediaColumn):
            bare = cls.unpacked(column.tokens, num_steps)
            return [replace(own, media=m, media_spans=s) for own, (m, s) in zip(bare, column.media, strict=True)]
        if not isinstance(column, CutColumn):
            return [cls(token_ids) for token_ids in unpacked(column, num_steps)]
        counts = unpacked(column.counts, num_steps)
        ids = unpacked(column.ids, [int(own.sum()) for own in counts])
        sets = map(KeptSets, counts, ids)
        return [cls(own, kept) for own, kept in zip(unpacked(column.token_ids, num_steps), sets, strict=True)]


@dataclass(frozen=True, eq=False)
class ScoredSteps:
    """T scored steps in order, with their inputs and outputs."""

    before: np.ndarray  # float [T, ...]
    after: np.ndarray  # float [T, ...]
    index: np.ndarray  # int32 [T]: index into the schedule
    timesteps: np.ndarray  # float32 [T]


@dataclass(frozen=True, eq=False)
class LatentActions:
    """T Gaussian denoising steps of a flow model.

    Step t goes from `latents[t]` to `latents[t + 1]`. Latents are rounded to their type before their log-probs are
    computed. The group's `Prompt.media` is the condition of the model.
    """

    latents: np.ndarray  # float32, float16 or uint16 [T + 1, ...]: uint16 holds the bits of bfloat16
    step_index: np.ndarray  # int32 [T]: index into the schedule; step i goes from sigmas[i] to sigmas[i + 1]
    timesteps: np.ndarray  # float32 [T]: the time of each step, as the model takes it
    sigmas: np.ndarray  # float32 [S + 1]: the noise levels of the whole schedule, decreasing

    def __post_init__(self) -> None:
        num = len(self.step_index)
        if len(self.latents) != num + 1 or len(self.timesteps) != num:
            raise ValueError(
                f"{len(self.latents)} latents, {num} step indices and {len(self.timesteps)} timesteps: T steps have "
                "T + 1 latents and T of each other"
            )
        if num and not 0 <= self.step_index.min() <= self.step_index.max() < len(self.sigmas) - 1:
            raise ValueError(f"steps {self.step_index.tolist()} do not lie in a schedule of {len(self.sigmas) - 1}")

    @classmethod
    def of_image(cls, latents: np.ndarray) -> LatentActions:
        """Returns one step that ends with the given latents [...], for an image that was not sampled by the policy."""
        levels = np.array([1, 0], dtype=np.float32)
        return cls(np.stack([latents, latents]), np.zeros(1, dtype=np.int32), levels[:1], levels)

    @property
    def values(self) -> np.ndarray:
        """The latents as numbers, float32 or float16 [T + 1, ...]."""
        return as_numbers(self.latents)

    def scored(self) -> ScoredSteps:
        return ScoredSteps(self.values[:-1], self.values[1:], self.step_index, self.timesteps)

    @property
    def num_steps(self) -> int:
        return int(self.step_index.shape[0])

    @property
    def num_bytes(self) -> int:
        return sum(getattr(self, f.name).nbytes for f in fields(self))

    @property
    def media(self) -> tuple[MediaHandle, ...]:
        return ()

    @property
    def media_spans(self) -> tuple[MediaSpan, ...]:
        return ()

    def content(self) -> Sequence[np.ndarray]:
        return [getattr(self, f.name) for f in fields(self)]

    def stretch(self, start: int, end: int) -> LatentActions:
        index, times = self.step_index[start:end], self.timesteps[start:end]
        return LatentActions(self.latents[start : end + 1], index, times, self.sigmas)

    def followed_by(self, more: LatentActions) -> LatentActions:
        return LatentActions(
            np.concatenate([self.latents, more.latents[1:]]),
            np.concatenate([self.step_index, more.step_index]),
            np.concatenate([self.timesteps, more.timesteps]),
            self.sigmas,
        )

    @classmethod
    def packed(cls, siblings: Sequence[Self]) -> list[Self]:
        """Returns the siblings unchanged: copying large latents into one array is slower than sending each array."""
        return list(siblings)

    @classmethod
    def unpacked(cls, column: list[Self], num_steps: Sequence[int]) -> list[Self]:
        return column


@dataclass(frozen=True, eq=False)
class PatchActions(LatentActions):
    """L continuous tokens of an image in order. Each token has W Gaussian denoising steps: T = L W, token by token.

    `latents` [W + 1, L, D] has the steps of all tokens side by side; `step_index` and `timesteps` have W entries.
    """

    tokens: np.ndarray  # [L, D], in the type of `latents`: the inputs of the model after each token

    @property
    def token_values(self) -> np.ndarray:
        """The tokens as numbers, float32 or float16 [L, D]."""
        return as_numbers(self.tokens)

    @property
    def num_steps(self) -> int:
        return len(self.tokens) * len(self.step_index)

    def scored(self) -> ScoredSteps:
        by_token = self.values.swapaxes(0, 1)
        before, after = (steps.reshape(self.num_steps, -1) for steps in (by_token[:, :-1], by_token[:, 1:]))
        index, timesteps = (np.tile(column, len(self.tokens)) for column in (self.step_index, self.timesteps))
        return ScoredSteps(before, after, index, timesteps)

    def stretch(self, start: int, end: int) -> PatchActions:
        """Returns the steps [start, end). Both must be borders of tokens."""
        (first, cut), (last, other_cut) = (divmod(step, len(self.step_index)) for step in (start, end))
        if cut or other_cut:
            raise ValueError(f"steps {start} to {end} cut a token of {len(self.step_index)} steps")
        return replace(self, latents=self.latents[:, first:last], tokens=self.tokens[first:last])

    def followed_by(self, more: LatentActions) -> PatchActions:
        assert isinstance(more, PatchActions), "tokens follow tokens"
        latents = np.concatenate([self.latents, more.latents], axis=1)
        return replace(self, latents=latents, tokens=np.concatenate([self.tokens, more.tokens]))


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Returns the bits of bfloat16 values as uint16, since NumPy has no bfloat16. `values` are rounded to bfloat16."""
    return (np.ascontiguousarray(values, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)


def as_numbers(values: np.ndarray) -> np.ndarray:
    """Inverse of `to_bfloat16`; arrays of other types are returned unchanged."""
    return (values.astype(np.uint32) << 16).view(np.float32) if values.dtype == np.uint16 else values


def packed(arrays: Sequence[np.ndarray]) -> Column:
    """Packs one array [T] per sibling for transport. Small arrays are concatenated, because each array has a fixed
    cost; large arrays are not, because of the copy."""
    if sum(array.nbytes for array in arrays) > MAX_BYTES_PACKED:
        return list(arrays)
    return np.concatenate(arrays)


def unpacked(column: Column, lengths: Sequence[int]) -> list[np.ndarray]:
    """Restores the arrays from `packed`."""
    if isinstance(column, list):
        return column
    return [column[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]
