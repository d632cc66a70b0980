"""REINFORCE++-baseline: rewards less the group's mean, standardised over the whole step."""

from __future__ import annotations

from torch import Tensor

from mobula.learner.algorithms.advantages.inputs import AdvantageOptions, StepRewards
from mobula.learner.algorithms.advantages.statistics import GroupStatistics, whitened


def reinforce_pp_baseline(rewards: StepRewards, options: AdvantageOptions) -> Tensor:
    """A_i = c_i / (std(c) + STD_FLOOR) with c_i = r_i - mean of the group, std over all responses of the step.

    Source: REINFORCE++, arXiv:2501.03262.
    """
    groups = GroupStatistics.of(rewards)
    return whitened(groups.centred(), rewards.included, options.std).float()
