"""What the policy did, exactly as the engine did it. Only Processor, Sampler and Policy look inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np


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
    def packed(cls, siblings: Sequence[TokenActions]) -> np.ndarray:
        """int32 [sum of T]: one array for all `siblings`, which travels as fast as one of them."""
        return np.concatenate([actions.token_ids for actions in siblings])

    @classmethod
    def unpacked(cls, packed: np.ndarray, num_steps: Sequence[int]) -> list[TokenActions]:
        """The siblings of `packed`, which have `num_steps` each."""
        return [cls(token_ids) for token_ids in stretches(packed, num_steps)]


def stretches(array: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    """Views of an [N] array, one after the other, of the given lengths."""
    return [array[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]
