"""Response lengths of simulated rollouts: from a distribution, or from lengths that a run recorded."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class ResponseLengths(Protocol):
    """Response lengths by prompt. The same prompt has the same lengths in every run of one seed."""

    def of(self, prompt_id: str, num_siblings: int) -> np.ndarray:
        """Returns the tokens of each sibling, int64 [num_siblings]."""
        ...


@dataclass(frozen=True)
class LognormalLengths:
    """Lognormal lengths, cut at the length limit of the engine."""

    median: float  # tokens, before the cut
    sigma: float  # of the logarithm; 0: all responses are equal
    max_tokens: int
    seed: int

    def of(self, prompt_id: str, num_siblings: int) -> np.ndarray:
        """Returns the tokens of each sibling, int64 [num_siblings]."""
        normal = _generator(self.seed, prompt_id).standard_normal(num_siblings)
        return np.clip(self.median * np.exp(self.sigma * normal), 1, self.max_tokens).astype(np.int64)


@dataclass(frozen=True)
class RecordedLengths:
    """Lengths drawn with replacement from recorded ones, cut at the length limit of the engine."""

    recorded: Sequence[int]
    max_tokens: int
    seed: int

    def of(self, prompt_id: str, num_siblings: int) -> np.ndarray:
        """Returns the tokens of each sibling, int64 [num_siblings]."""
        drawn = _generator(self.seed, prompt_id).choice(np.asarray(self.recorded, dtype=np.int64), num_siblings)
        return np.clip(drawn, 1, self.max_tokens)


def _generator(seed: int, prompt_id: str) -> np.random.Generator:
    digest = hashlib.sha256(f"{seed}/{prompt_id}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "big"))
