"""Pass@k advantage: what a response adds to the chance that one of k siblings solves the task."""

from __future__ import annotations

from math import comb, sqrt

import torch
from torch import Tensor

from mobula.learner.algorithms.advantages.inputs import AdvantageOptions, StepRewards
from mobula.learner.algorithms.advantages.statistics import GroupStatistics


def pass_at_k(rewards: StepRewards, options: AdvantageOptions) -> Tensor:
    """With n siblings of which m are not solved, over all subsets of k siblings (a subset passes if one is solved):

        p = 1 - C(m, k) / C(n, k),  std = sqrt(p (1 - p))
        A_solved = (1 - p) / std,  A_other = (1 - p - C(m - 1, k - 1) / C(n - 1, k - 1)) / std

    0 where every subset passes or none does, and in a group of fewer than k. `algorithm.solved_reward` is the least
    reward of a solved response.

    Source: Pass@k Training, arXiv:2508.10751 (analytical derivation).
    """
    groups = GroupStatistics.of(rewards)
    is_solved = groups.values >= options.solved_reward
    solved = groups.sum(is_solved.double())
    pairs = zip(groups.counts.tolist(), solved.tolist(), strict=True)
    both = torch.tensor([_advantages(int(n), int(n - s), options.pass_k) for n, s in pairs], dtype=torch.float64)
    return groups.finish(torch.where(is_solved, groups.per_member(both[:, 0]), groups.per_member(both[:, 1])))


def _advantages(n: int, m: int, k: int) -> tuple[float, float]:
    """Advantage of a solved response and of another one; `n` siblings, `m` not solved."""
    if n < k or m < k or m == n:
        return 0.0, 0.0
    failed = comb(m, k) / comb(n, k)
    std = sqrt(failed * (1 - failed))
    return failed / std, (failed - comb(m - 1, k - 1) / comb(n - 1, k - 1)) / std
