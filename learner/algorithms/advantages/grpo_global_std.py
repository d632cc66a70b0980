"""Flow-GRPO's advantage: centred within the group, divided by the standard deviation of all rewards of the step."""

from __future__ import annotations

import torch
from torch import Tensor

from mobula.learner.algorithms.advantages.inputs import AdvantageOptions, StepRewards
from mobula.learner.algorithms.advantages.statistics import STD_FLOOR, GroupStatistics


def grpo_global_std(rewards: StepRewards, options: AdvantageOptions) -> Tensor:
    """A_i = (r_i - mean(r of the group)) / (std(r of the step) + STD_FLOOR).

    A group whose rewards hardly differ is not blown up to the scale of the others.

    Source: Flow-GRPO, arXiv:2505.05470, and its `global_std`.
    """
    groups = GroupStatistics.of(rewards)
    step = GroupStatistics(rewards.values, rewards.included, torch.zeros_like(rewards.group_ids))
    return groups.finish(groups.centred() / (step.per_member(step.std(options.std)) + STD_FLOOR))
