"""GDPO: each reward component standardised within the group before they are summed."""

from __future__ import annotations

import torch
from torch import Tensor

from mobula.learner.algorithms.advantages.inputs import AdvantageOptions, StepRewards
from mobula.learner.algorithms.advantages.statistics import STD_FLOOR, GroupStatistics, whitened


def gdpo(rewards: StepRewards, options: AdvantageOptions) -> Tensor:
    """A_i = whitened over the step(sum_k w_k (r_ik - mean_k) / (std_k + STD_FLOOR)), statistics of k within the group.

    Distinct combinations of components keep distinct advantages, which the sum of raw rewards can merge. Reads
    `components` and `weights`, not `values`.

    Source: GDPO, arXiv:2601.05242.
    """
    total = torch.zeros(rewards.values.shape, dtype=torch.float64)
    for values, weights in zip(rewards.components.T, rewards.weights.T, strict=True):
        group = GroupStatistics(values, rewards.included, rewards.group_ids)
        total = total + weights * group.centred() / (group.per_member(group.std(options.std)) + STD_FLOOR)
    return whitened(total, rewards.included, options.std).float()
