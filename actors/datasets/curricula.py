"""Curricula: the order of an epoch's rows by difficulty."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mobula.actors.datasets.rows import Row, RowError

Stages = Callable[[np.ndarray, int], list[np.ndarray]]
"""(difficulty [N], number of stages) -> sorted positions of each stage, in the order of stages."""


def everything(difficulty: np.ndarray, num_stages: int) -> list[np.ndarray]:
    """All rows in one stage."""
    return [np.arange(len(difficulty))]


def easy_first(difficulty: np.ndarray, num_stages: int) -> list[np.ndarray]:
    """The easiest rows, then harder ones, in stages of equal size.

    Example:
        >>> easy_first(np.array([3.0, 1.0, 2.0, 9.0]), 2)
        [array([1, 2]), array([0, 3])]
    """
    ranked = np.argsort(difficulty, kind="stable")
    return [np.sort(stage) for stage in np.array_split(ranked, num_stages) if len(stage)]


def hard_first(difficulty: np.ndarray, num_stages: int) -> list[np.ndarray]:
    """The hardest rows, then easier ones, in stages of equal size."""
    return easy_first(-difficulty, num_stages)


CURRICULA: Mapping[str, Stages] = {"none": everything, "easy_first": easy_first, "hard_first": hard_first}
PROMPT_TOKENS = "prompt_tokens"  # key for the length of the prompt


@dataclass(frozen=True)
class Curriculum:
    """The stages of the first `num_epochs` epochs; later epochs have no stages."""

    stages: Stages
    key: str  # metadata key, or PROMPT_TOKENS
    num_stages: int
    num_epochs: int

    def difficulty(self, row: Row, num_tokens: int) -> float:
        """Raises: RowError: the row's metadata has no number under the key."""
        value: Any = num_tokens if self.key == PROMPT_TOKENS else row.metadata.get(self.key)
        try:
            if isinstance(value, bool) or not math.isfinite(number := float(value)):
                raise ValueError
        except (TypeError, ValueError) as error:
            detail = f"data.curriculum.key={self.key} is {value!r:.40} in its metadata: give every row a number there"
            raise RowError("bad_difficulty", detail, row.sample_id) from error
        return number
