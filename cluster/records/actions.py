"""What the policy did, exactly as the engine did it. Only Processor, Sampler and Policy look inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

Column = np.ndarray | list[np.ndarray]
"""What siblings have of one kind, on its way: all in a row, or an array each."""

MAX_BYTES_PACKED = 1 << 20  # of a column that travels as one array


@dataclass(frozen=True)
class TokenActions:
    """The tokens that the engine sampled after an expanded prompt.

    `token_ids` are the engine's own ids, never decoded and tokenised again. The prompt they follow is the group's
    `Prompt.expanded_ids`.
    """

    token_ids: np.ndarray  # int32 [T]

    @property
    def num_steps(self) -> int:
        return int(self.token_ids.shape[0])

    @classmethod
    def packed(cls, siblings: Sequence[TokenActions]) -> Column:
        """int32: the actions of all `siblings` as they travel."""
        return packed([actions.token_ids for actions in siblings])

    @classmethod
    def unpacked(cls, column: Column, num_steps: Sequence[int]) -> list[TokenActions]:
        """The siblings of `column`, which have `num_steps` each."""
        return [cls(token_ids) for token_ids in unpacked(column, num_steps)]


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
