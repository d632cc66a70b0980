"""GRPO: rewards standardised within the group."""

from __future__ import annotations

from torch import Tensor

from mobula.learner.algorithms.advantages.inputs import AdvantageOptions, StepRewards
from mobula.learner.algorithms.advantages.statistics import STD_FLOOR, GroupStatistics


def grpo(rewards: StepRewards, options: AdvantageOptions) -> Tensor:
    """A_i = (r_i - mean(r)) / (std(r) + STD_FLOOR) within the group.

    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.
    """
    groups = GroupStatistics.of(rewards)
    return groups.finish(groups.centred() / (groups.per_member(groups.std(options.std)) + STD_FLOOR))
