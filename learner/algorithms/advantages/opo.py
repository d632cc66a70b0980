"""OPO: rewards less the length-weighted mean of the group."""

from __future__ import annotations

import torch
from torch import Tensor

from mobula.learner.algorithms.advantages.inputs import AdvantageOptions, StepRewards
from mobula.learner.algorithms.advantages.statistics import GroupStatistics


def opo(rewards: StepRewards, options: AdvantageOptions) -> Tensor:
    """A_i = r_i - b with b = sum_j L_j r_j / sum_j L_j over the group, L_j the trained tokens of response j.

    b is the baseline of least variance where a gradient's squared norm grows with the length.

    Source: On-Policy RL with Optimal Reward Baseline, arXiv:2505.23585.
    """
    groups = GroupStatistics.of(rewards)
    lengths = rewards.lengths.double()
    baseline = groups.sum(lengths * groups.values) / groups.sum(lengths).clamp(min=1)
    has_nothing = groups.per_member(groups.is_constant())
    return groups.finish(torch.where(has_nothing, 0.0, groups.values - groups.per_member(baseline)))
