"""Advantages: how much better a response is than its siblings. One formula a function.

Each function takes `rewards [N]`, `included [N]` and `group_ids [N]` of all responses of a step and returns advantages
[N]. Siblings are those with equal ids, wherever they stand. A response that is not included (its reward is unknown)
takes no part in its group's statistics and gets advantage 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

STD_FLOOR = 1e-4  # added to a group's standard deviation, so that equal rewards give 0 and not 0/0

AdvantageFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


def grpo(rewards: Tensor, included: Tensor, group_ids: Tensor) -> Tensor:
    """A_i = (r_i - mean(r)) / (std(r) + STD_FLOOR), std with n - 1; 0 in a group of one.

    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.
    """
    groups = _Groups(rewards, included, group_ids)
    centred = groups.rewards - groups.per_member(groups.mean())
    variance = groups.sum(centred.square()) / (groups.counts - 1).clamp(min=1)
    return groups.finish(centred / (groups.per_member(variance.sqrt()) + STD_FLOOR))


def dr_grpo(rewards: Tensor, included: Tensor, group_ids: Tensor) -> Tensor:
    """A_i = r_i - mean(r): GRPO without the bias of dividing by the standard deviation.

    Source: Understanding R1-Zero-Like Training, arXiv:2503.20783, section 3.2.
    """
    groups = _Groups(rewards, included, group_ids)
    return groups.finish(groups.rewards - groups.per_member(groups.mean()))


def rloo(rewards: Tensor, included: Tensor, group_ids: Tensor) -> Tensor:
    """A_i = r_i - mean of the others = n / (n - 1) * (r_i - mean(r)); 0 in a group of one.

    Source: Back to Basics, arXiv:2402.14740, section 3.3.
    """
    groups = _Groups(rewards, included, group_ids)
    scale = groups.counts / (groups.counts - 1).clamp(min=1)
    return groups.finish((groups.rewards - groups.per_member(groups.mean())) * groups.per_member(scale))


def reinforce(rewards: Tensor, included: Tensor, group_ids: Tensor) -> Tensor:
    """A_i = r_i, without a baseline. Source: Williams, 1992, doi:10.1007/BF00992696."""
    return _Groups(rewards, included, group_ids).finish(rewards.double())


ADVANTAGES: dict[str, AdvantageFunction] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "reinforce": reinforce}


class _Groups:
    """Per-group sums over included members, in float64: rounding must not look like a difference between siblings."""

    def __init__(self, rewards: Tensor, included: Tensor, group_ids: Tensor) -> None:
        self._included = included
        self._dtype = rewards.dtype
        self.rewards = torch.where(included, rewards.double(), 0.0)  # [N]
        ids, self._index = torch.unique(group_ids, return_inverse=True)
        self._num_groups = ids.numel()
        self.counts = self.sum(torch.ones_like(self.rewards))  # [G]

    def sum(self, values: Tensor) -> Tensor:
        """values [N] -> sums over each group's included members [G]."""
        sums = torch.zeros(self._num_groups, dtype=torch.float64, device=values.device)
        return sums.index_add(0, self._index, torch.where(self._included, values, 0.0))

    def mean(self) -> Tensor:
        return self.sum(self.rewards) / self.counts.clamp(min=1)

    def per_member(self, values: Tensor) -> Tensor:
        """values [G] -> [N]."""
        return values[self._index]

    def finish(self, advantages: Tensor) -> Tensor:
        return torch.where(self._included, advantages, 0.0).to(self._dtype)
