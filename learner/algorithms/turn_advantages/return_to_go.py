"""Return-to-go: what followed a turn, less what followed the same turn of the other siblings."""

from __future__ import annotations

import numpy as np

from mobula.learner.algorithms.turn_advantages.inputs import StepTurns


def return_to_go(turns: StepTurns, discount: float) -> np.ndarray:
    """A_ik = G_ik - mean over the other siblings j of G_jk, with G_ik = sum_{m >= k} discount^(m - k) r_im.

    A sibling that has ended before turn k counts with G_jk = 0, so that the baseline depends on nothing that sibling i
    did, and the policy gradient of undiscounted returns stays unbiased. A mean over the siblings that reach turn k, i
    among them, or a division by their standard deviation would bias it. A sibling without others has advantages of 0.

    Source: the policy gradient with a baseline, Williams 1992, doi:10.1007/BF00992696; leave-one-out,
    arXiv:2402.14740, section 3.3, here at every turn.
    """
    returns = np.where(turns.included[:, None], turns.rewards, 0.0).astype(np.float64)
    for k in range(returns.shape[1] - 2, -1, -1):
        returns[:, k] += discount * returns[:, k + 1]
    advantages = np.zeros_like(returns)
    for group in np.unique(turns.group_ids[turns.included]):
        members = (turns.group_ids == group) & turns.included
        num = int(members.sum())
        if num > 1:
            own = returns[members]
            advantages[members] = own - (own.sum(axis=0) - own) / (num - 1)
    return np.where(np.arange(returns.shape[1]) < turns.num_turns[:, None], advantages, 0.0)
