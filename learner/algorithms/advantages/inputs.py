"""Inputs of advantage functions: the rewards of one step's responses, and the options of `algorithm`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class EarlierRewards:
    """M rewards of the step's prompts in earlier steps."""

    values: Tensor  # float64 [M], shaped
    prompt_ids: Tensor  # int [M]


@dataclass(frozen=True)
class StepRewards:
    """All N responses of a step. Siblings have equal group ids, wherever they stand.

    Responses that are not included have no reward. Statistics exclude them; their advantage is 0.
    """

    values: Tensor  # float [N], shaped
    included: Tensor  # bool [N]
    group_ids: Tensor  # int [N]
    lengths: Tensor  # int [N], trained tokens
    components: Tensor  # float [N, C], unweighted value of each reward component
    weights: Tensor  # float [N, C], weight of the component in the response's recipe; 0 outside of it
    prompt_ids: Tensor  # int [N]: two groups of a step may have the same prompt
    earlier: EarlierRewards


@dataclass(frozen=True)
class AdvantageOptions:
    """The keys of `algorithm` that some advantage functions depend on."""

    std: str  # "population" or "unbiased"
    pass_k: int
    solved_reward: float


AdvantageFunction = Callable[[StepRewards, AdvantageOptions], Tensor]
"""Returns advantages [N], one number a response."""
