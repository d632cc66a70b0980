"""RLOO: rewards less the mean of the other siblings."""

from __future__ import annotations

from torch import Tensor

from mobula.learner.algorithms.advantages.inputs import AdvantageOptions, StepRewards
from mobula.learner.algorithms.advantages.statistics import GroupStatistics


def rloo(rewards: StepRewards, options: AdvantageOptions) -> Tensor:
    """A_i = r_i - mean of the others = n / (n - 1) * (r_i - mean(r)); 0 in a group of one.

    Source: Back to Basics, arXiv:2402.14740, section 3.3.
    """
    groups = GroupStatistics.of(rewards)
    scale = groups.counts / (groups.counts - 1).clamp(min=1)
    return groups.finish(groups.centred() * groups.per_member(scale))
