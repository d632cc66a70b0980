"""REINFORCE without a baseline."""

from __future__ import annotations

from torch import Tensor

from learner.algorithms.advantages.inputs import AdvantageOptions, StepRewards
from learner.algorithms.advantages.statistics import GroupStatistics


def reinforce(rewards: StepRewards, options: AdvantageOptions) -> Tensor:
    """A_i = r_i. Source: Williams, 1992, doi:10.1007/BF00992696."""
    groups = GroupStatistics.of(rewards)
    return groups.finish(groups.values)
