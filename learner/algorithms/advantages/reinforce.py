"""REINFORCE: without a baseline, and with the mean of the step as one."""

from __future__ import annotations

import torch
from torch import Tensor

from mobula.learner.algorithms.advantages.inputs import AdvantageOptions, StepRewards
from mobula.learner.algorithms.advantages.statistics import GroupStatistics


def reinforce(rewards: StepRewards, options: AdvantageOptions) -> Tensor:
    """A_i = r_i. Source: Williams, 1992, doi:10.1007/BF00992696."""
    groups = GroupStatistics.of(rewards)
    return groups.finish(groups.values)


def reinforce_batch(rewards: StepRewards, options: AdvantageOptions) -> Tensor:
    """A_i = r_i - mean of all rewards of the step. Source: Williams, 1992, doi:10.1007/BF00992696."""
    step = GroupStatistics(rewards.values, rewards.included, torch.zeros_like(rewards.group_ids))
    return step.finish(step.centred())
