"""Statistics over groups and over the whole step, in float64: rounding must not look like a difference of rewards."""

from __future__ import annotations

import torch
from torch import Tensor

from mobula.learner.algorithms.advantages.inputs import StepRewards

STD_FLOOR = 1e-4  # added to a standard deviation before dividing by it
POPULATION = "population"  # the variance divides by n; "unbiased" divides by n - 1


class GroupStatistics:
    """Sums over the included members of each group. G groups, N responses."""

    def __init__(self, values: Tensor, included: Tensor, group_ids: Tensor) -> None:
        """`values`, `included` and `group_ids` are [N]."""
        self.included = included
        self.values = torch.where(included, values.double(), 0.0)  # [N]
        ids, self._index = torch.unique(group_ids, return_inverse=True)
        self.num_groups = ids.numel()
        self.counts = self.sum(torch.ones_like(self.values))  # [G]

    @classmethod
    def of(cls, rewards: StepRewards) -> GroupStatistics:
        return cls(rewards.values, rewards.included, rewards.group_ids)

    def sum(self, values: Tensor) -> Tensor:
        """values [N] -> sums over each group's included members [G]."""
        sums = torch.zeros(self.num_groups, dtype=torch.float64, device=values.device)
        return sums.index_add(0, self._index, torch.where(self.included, values, 0.0).double())

    def mean(self) -> Tensor:
        """[G]; 0 for a group without included members."""
        return self.sum(self.values) / self.counts.clamp(min=1)

    def std(self, kind: str) -> Tensor:
        """[G]; 0 for a group of one."""
        return _std(self.sum(self.centred().square()), self.counts, kind)

    def centred(self) -> Tensor:
        """value - mean of the group [N]; exactly 0 in a group of one and where all values are equal."""
        return torch.where(self.per_member(self.is_constant()), 0.0, self.values - self.per_member(self.mean()))

    def is_constant(self) -> Tensor:
        """bool [G]: at most one included member, or equal values, so that there is nothing to compare."""
        start = torch.full((self.num_groups,), torch.inf, dtype=torch.float64, device=self.values.device)
        low = start.scatter_reduce(0, self._index, torch.where(self.included, self.values, torch.inf), "amin")
        high = -start.scatter_reduce(0, self._index, torch.where(self.included, -self.values, torch.inf), "amin")
        return (low == high) | (self.counts == 0)

    def per_member(self, values: Tensor) -> Tensor:
        """values [G] -> [N]."""
        return values[self._index]

    def finish(self, advantages: Tensor) -> Tensor:
        """advantages [N] as float32; 0 for responses that are not included."""
        return torch.where(self.included, advantages, 0.0).float()


def whitened(values: Tensor, included: Tensor, kind: str) -> Tensor:
    """(v - mean) / (std + STD_FLOOR) over the included values, float64; 0 where all of them are equal.

    Args:
        values: any shape.
        included: bool, the same shape. What is not included has no part in the statistics and becomes 0.
    """
    chosen = values[included].double()
    result = torch.zeros(values.shape, dtype=torch.float64, device=values.device)
    if chosen.numel() == 0 or chosen.min() == chosen.max():
        return result
    centred = chosen - chosen.mean()
    std = _std(centred.square().sum(), torch.tensor(float(chosen.numel())), kind)
    result[included] = centred / (std + STD_FLOOR)
    return result


def _std(sum_of_squares: Tensor, counts: Tensor, kind: str) -> Tensor:
    freedom = counts if kind == POPULATION else counts - 1
    return (sum_of_squares / freedom.clamp(min=1)).sqrt()
