"""Advantages of responses over a baseline. One formula per file; `algorithm.advantage` selects."""

from __future__ import annotations

from mobula.learner.algorithms.advantages.cpgd import cpgd, cpgd_clip_filter
from mobula.learner.algorithms.advantages.dr_grpo import dr_grpo
from mobula.learner.algorithms.advantages.gdpo import gdpo
from mobula.learner.algorithms.advantages.grpo import grpo
from mobula.learner.algorithms.advantages.grpo_global_std import grpo_global_std
from mobula.learner.algorithms.advantages.inputs import (
    AdvantageFunction,
    AdvantageOptions,
    EarlierRewards,
    StepRewards,
)
from mobula.learner.algorithms.advantages.opo import opo
from mobula.learner.algorithms.advantages.pass_at_k import pass_at_k
from mobula.learner.algorithms.advantages.prompt_stats import prompt_stats, prompt_stats_global_std
from mobula.learner.algorithms.advantages.reinforce import reinforce, reinforce_batch
from mobula.learner.algorithms.advantages.reinforce_pp import reinforce_pp
from mobula.learner.algorithms.advantages.reinforce_pp_baseline import reinforce_pp_baseline
from mobula.learner.algorithms.advantages.rloo import rloo
from mobula.learner.algorithms.advantages.statistics import GroupStatistics, whitened

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
