"""Dr. GRPO: rewards less the mean of the group."""

from __future__ import annotations

from torch import Tensor

from mobula.learner.algorithms.advantages.inputs import AdvantageOptions, StepRewards
from mobula.learner.algorithms.advantages.statistics import GroupStatistics


def dr_grpo(rewards: StepRewards, options: AdvantageOptions) -> Tensor:
    """A_i = r_i - mean(r) within the group: GRPO without the bias of dividing by the standard deviation.

    Source: Understanding R1-Zero-Like Training, arXiv:2503.20783, section 3.2.
    """
    groups = GroupStatistics.of(rewards)
    return groups.finish(groups.centred())
