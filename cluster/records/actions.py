"""The actions of a trajectory, exactly as the engine took them. Only processor, sampler and policy read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from mobula.cluster.records.media import MediaHandle, MediaSpan

Column = np.ndarray | list[np.ndarray]
"""The arrays of one kind of all siblings, for transport: concatenated, or one for each."""

MAX_BYTES_PACKED = 1 << 20  # of a column that travels as one array


@dataclass(frozen=True, eq=False)
class KeptSets:
    """The tokens among which each step was sampled, where sampling cuts the distribution (top-k, top-p, min-p)."""

    counts: np.ndarray  # int32 [T]; 0 says that nothing was cut in that step
    ids: np.ndarray  # int32 [sum of `counts`]: one set after the other

    @classmethod
    def of(cls, is_kept: np.ndarray) -> KeptSets:
        """From a bool [T, V] array."""
        return cls(is_kept.sum(axis=1, dtype=np.int32), np.nonzero(is_kept)[1].astype(np.int32))

    @classmethod
    def uncut(cls, num_steps: int) -> KeptSets:
        """Of steps that were sampled among all tokens, or not sampled, beside steps that have sets."""
        return cls(np.zeros(num_steps, dtype=np.int32), np.zeros(0, dtype=np.int32))

    def between(self, start: int, end: int) -> KeptSets:
        """The sets of the steps [start, end)."""
        first, last = self.counts[:start].sum(), self.counts[:end].sum()
        return KeptSets(self.counts[start:end], self.ids[first:last])

    def followed_by(self, more: KeptSets) -> KeptSets:
        return KeptSets(np.concatenate([self.counts, more.counts]), np.concatenate([self.ids, more.ids]))


class CutColumn(NamedTuple):
    """The actions of siblings with `KeptSets`, on their way."""

    token_ids: Column
    counts: Column
    ids: Column


class MediaColumn(NamedTuple):
    """The actions of siblings with media of later turns, on their way."""

    tokens: Column | CutColumn
    media: list[tuple[tuple[MediaHandle, ...], tuple[MediaSpan, ...]]]


class Actions(Protocol):
    """T decision steps of one trajectory: tokens, or denoising steps."""

    @property
    def num_steps(self) -> int:
        """T"""
        ...

    @property
    def num_bytes(self) -> int:
        """Of its arrays."""
        ...

    def stretch(self, start: int, end: int) -> Self:
        """Steps [start, end)."""
        ...

    def followed_by(self, more: Self) -> Self:
        """These steps, and those that came next."""
        ...

    @property
    def media(self) -> tuple[MediaHandle, ...]:
        """Pictures and other media that an environment showed between the steps."""
        ...

    @property
    def media_spans(self) -> tuple[MediaSpan, ...]:
        """The steps that each of `media` fills."""
        ...

    @classmethod
    def packed(cls, siblings: Sequence[Self]) -> Any:
        """The actions of all `siblings` as they travel."""
        ...

    @classmethod
    def unpacked(cls, column: Any, num_steps: Sequence[int]) -> list[Self]:
        """The siblings that were `packed`, which have `num_steps` each."""
        ...


@dataclass(frozen=True)
class TokenActions:
    """The tokens that follow an expanded prompt: those that the engine sampled, and of an episode those between turns.

    `token_ids` are the engine's own ids, never decoded and tokenised again. The prompt they follow is the group's
    `Prompt.expanded_ids`. `media[i]`, of an observation, fills `media_spans[i]` of `token_ids`.
    """

    token_ids: np.ndarray  # int32 [T]
    kept: KeptSets | None = None  # None: each step was sampled among all tokens
    media: tuple[MediaHandle, ...] = ()
    media_spans: tuple[MediaSpan, ...] = ()

    @property
    def num_steps(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_bytes(self) -> int:
        kept = 0 if self.kept is None else self.kept.counts.nbytes + self.kept.ids.nbytes
        return self.token_ids.nbytes + kept

    def stretch(self, start: int, end: int) -> TokenActions:
        """Steps [start, end); no medium may lie on a border."""
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
        """int32: the actions of all `siblings` as they travel; all of them have kept sets, or none."""
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
        """The siblings of `column`, which have `num_steps` each."""
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
class LatentActions:
    """T denoising steps of a flow model that sampled from a Gaussian, one after the other.

    Step t went from `latents[t]` to `latents[t + 1]`, which are the values that were scored: rounded to their type
    before that. What the model was conditioned on is the group's `Prompt.media`.
    """

    latents: np.ndarray  # float32, float16 or uint16 [T + 1, ...]: uint16 holds the bits of bfloat16
    step_index: np.ndarray  # int32 [T]: place of each step in the schedule; step i goes from sigmas[i] to sigmas[i + 1]
    timesteps: np.ndarray  # float32 [T]: the time of each step, as the model takes it
    sigmas: np.ndarray  # float32 [S + 1]: the noise levels of the whole schedule, falling

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
    def of_picture(cls, latents: np.ndarray) -> LatentActions:
        """A picture [...] that was not denoised here: one step that ends with it, of a schedule of that step alone."""
        levels = np.array([1, 0], dtype=np.float32)
        return cls(np.stack([latents, latents]), np.zeros(1, dtype=np.int32), levels[:1], levels)

    @property
    def values(self) -> np.ndarray:
        """float32 or float16 [T + 1, ...]: the latents as numbers."""
        return from_bfloat16(self.latents) if self.latents.dtype == np.uint16 else self.latents

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
    def packed(cls, siblings: Sequence[LatentActions]) -> list[LatentActions]:
        """As they are: latents are many bytes, and to copy them takes longer than to send each array by itself."""
        return list(siblings)

    @classmethod
    def unpacked(cls, column: list[LatentActions], num_steps: Sequence[int]) -> list[LatentActions]:
        return column


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """uint16: the bits in bfloat16 of float32 values that are rounded to it, a type that NumPy does not have."""
    return (np.ascontiguousarray(values, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """float32: the values that `to_bfloat16` was given."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def packed(arrays: Sequence[np.ndarray]) -> Column:
    """One array [T] a sibling as they travel. Few bytes go as one array, for an array takes longer than its few bytes;
    many go as they are, for to copy them takes longer than that.
    """
    if sum(array.nbytes for array in arrays) > MAX_BYTES_PACKED:
        return list(arrays)
    return np.concatenate(arrays)


def unpacked(column: Column, lengths: Sequence[int]) -> list[np.ndarray]:
    """The arrays that were `packed`."""
    return column if isinstance(column, list) else stretches(column, lengths)


def stretches(array: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    """Views of an [N] array, one after the other, of the given lengths."""
    return [array[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]
