"""Advantages: how much better a response is than a baseline. One formula a file; `algorithm.advantage` chooses."""

from __future__ import annotations

from learner.algorithms.advantages.cpgd import cpgd, cpgd_clip_filter
from learner.algorithms.advantages.dr_grpo import dr_grpo
from learner.algorithms.advantages.gdpo import gdpo
from learner.algorithms.advantages.grpo import grpo
from learner.algorithms.advantages.grpo_global_std import grpo_global_std
from learner.algorithms.advantages.inputs import (
    AdvantageFunction,
    AdvantageOptions,
    EarlierRewards,
    StepRewards,
)
from learner.algorithms.advantages.opo import opo
from learner.algorithms.advantages.pass_at_k import pass_at_k
from learner.algorithms.advantages.prompt_stats import prompt_stats, prompt_stats_global_std
from learner.algorithms.advantages.reinforce import reinforce, reinforce_batch
from learner.algorithms.advantages.reinforce_pp import reinforce_pp
from learner.algorithms.advantages.reinforce_pp_baseline import reinforce_pp_baseline
from learner.algorithms.advantages.rloo import rloo
from learner.algorithms.advantages.statistics import GroupStatistics, whitened

ADVANTAGES: dict[str, AdvantageFunction] = {
    "grpo": grpo,
    "grpo_global_std": grpo_global_std,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce": reinforce,
    "reinforce_batch": reinforce_batch,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "opo": opo,
    "cpgd": cpgd,
    "cpgd_clip_filter": cpgd_clip_filter,
    "gdpo": gdpo,
    "pass_at_k": pass_at_k,
    "prompt_stats": prompt_stats,
    "prompt_stats_global_std": prompt_stats_global_std,
}

__all__ = [
    "ADVANTAGES",
    "AdvantageFunction",
    "AdvantageOptions",
    "EarlierRewards",
    "GroupStatistics",
    "StepRewards",
    "whitened",
]
