"""Advantages against all rewards that a prompt had lately, not those of its group alone."""

from __future__ import annotations

import torch
from torch import Tensor

from mobula.learner.algorithms.advantages.inputs import AdvantageOptions, StepRewards
from mobula.learner.algorithms.advantages.statistics import STD_FLOOR, GroupStatistics


def prompt_stats(rewards: StepRewards, options: AdvantageOptions) -> Tensor:
    """A_i = (r_i - mean(h)) / (std(h) + STD_FLOOR), h = the rewards of the prompt in this step and in those before it.

    Source: the per-prompt statistics of DDPO, arXiv:2305.13301, and Flow-GRPO, arXiv:2505.05470.
    """
    prompts = _by_prompt(rewards)
    num = len(rewards.values)
    std = prompts.per_member(prompts.std(options.std))[:num]
    return GroupStatistics.of(rewards).finish(prompts.centred()[:num] / (std + STD_FLOOR))


def prompt_stats_global_std(rewards: StepRewards, options: AdvantageOptions) -> Tensor:
    """A_i = (r_i - mean(h)) / (std(r of the step) + STD_FLOOR), h as in `prompt_stats`. Source: the same."""
    centred = _by_prompt(rewards).centred()[: len(rewards.values)]
    step = GroupStatistics(rewards.values, rewards.included, torch.zeros_like(rewards.group_ids))
    return step.finish(centred / (step.per_member(step.std(options.std)) + STD_FLOOR))


def _by_prompt(rewards: StepRewards) -> GroupStatistics:
    """Over the step's responses and, behind them, the earlier rewards of their prompts."""
    earlier = rewards.earlier
    return GroupStatistics(
        torch.cat([rewards.values, earlier.values]),
        torch.cat([rewards.included, torch.ones_like(earlier.prompt_ids, dtype=torch.bool)]),
        torch.cat([rewards.prompt_ids, earlier.prompt_ids]),
    )
