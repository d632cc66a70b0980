"""REINFORCE++: rewards standardised over the whole step."""

from __future__ import annotations

from torch import Tensor

from mobula.learner.algorithms.advantages.inputs import AdvantageOptions, StepRewards
from mobula.learner.algorithms.advantages.statistics import whitened


def reinforce_pp(rewards: StepRewards, options: AdvantageOptions) -> Tensor:
    """A_i = (r_i - mean) / (std + STD_FLOOR), statistics over all responses of the step.

    Source: REINFORCE++, arXiv:2501.03262.
    """
    return whitened(rewards.values, rewards.included, options.std).float()
