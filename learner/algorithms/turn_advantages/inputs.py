"""Inputs of turn advantages: the rewards of the turns of one step's episodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class StepTurns:
    """All N episodes of a step. Siblings have equal group ids, wherever they stand.

    An episode that is not included has no reward. It takes no part in any statistic and gets advantages of 0.
    """

    rewards: np.ndarray  # float [N, K], of turn k; 0 behind the last turn of an episode
    num_turns: np.ndarray  # int [N]
    included: np.ndarray  # bool [N]
    group_ids: np.ndarray  # int [N]


TurnAdvantage = Callable[[StepTurns, float], np.ndarray]
"""`(turns, discount)` to advantages, float64 [N, K]; 0 behind the last turn of an episode."""
