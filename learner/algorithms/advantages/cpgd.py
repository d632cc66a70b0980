"""CPGD: centred rewards with the weight of their group, by standard deviation or by clip filter."""

from __future__ import annotations

from torch import Tensor

from mobula.learner.algorithms.advantages.inputs import AdvantageOptions, StepRewards
from mobula.learner.algorithms.advantages.statistics import GroupStatistics

STD_EPSILON = 1e-6
MAX_WEIGHT = 3.0  # of the clip filter


def cpgd(rewards: StepRewards, options: AdvantageOptions) -> Tensor:
    """A_i = w (r_i - mean(r)) within the group, w = 1 / (std(r) + STD_EPSILON).

    Source: CPGD, arXiv:2505.12504 (weight by standard deviation).
    """
    groups = GroupStatistics.of(rewards)
    return groups.finish(groups.centred() / (groups.per_member(groups.std(options.std)) + STD_EPSILON))


def cpgd_clip_filter(rewards: StepRewards, options: AdvantageOptions) -> Tensor:
    """A_i = w (r_i - mean(r)) within the group, w = min(MAX_WEIGHT, groups of the step / groups that differ).

    The weight makes up for the groups of equal rewards, which give no gradient.

    Source: CPGD, arXiv:2505.12504 (clip-filter-like weight).
    """
    groups = GroupStatistics.of(rewards)
    num_differing = (~groups.is_constant()).sum().clamp(min=1)
    return groups.finish(groups.centred() * (groups.num_groups / num_differing).clamp(max=MAX_WEIGHT))
