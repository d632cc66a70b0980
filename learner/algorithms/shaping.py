"""Changes to rewards and advantages, as functions; `learner/credit.py` applies them in their order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def repeated_share(token_ids: Sequence[int], ngram: int) -> float:
    """1 - distinct n-grams / n-grams of a response; 0 where it is shorter than one n-gram.

    Source: the repetition penalty of Demystifying Long Chain-of-Thought Reasoning, arXiv:2502.03373, in its plain form.
    """
    num = len(token_ids) - ngram + 1
    if num <= 0:
        return 0.0
    return 1 - len({tuple(token_ids[i : i + ngram]) for i in range(num)}) / num


def length_rewards(lengths: Tensor, is_solved: Tensor, included: Tensor, group_ids: Tensor) -> Tensor:
    """l_i = 0.5 - (length_i - shortest) / (longest - shortest) within the group, at most 0 where i is not solved; 0
    where all lengths are equal. All arguments and the result are [N].

    Source: Kimi k1.5, arXiv:2501.12599, section 2.3.3.
    """
    result = torch.zeros(lengths.shape, dtype=torch.float64)
    for group in group_ids.unique():
        members = (group_ids == group) & included
        chosen = lengths[members].double()
        if chosen.numel() < 2 or chosen.min() == chosen.max():
            continue
        share = 0.5 - (chosen - chosen.min()) / (chosen.max() - chosen.min())
        result[members] = torch.where(is_solved[members], share, share.clamp(max=0))
    return result


def token_rewards(reward: float, costs: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The reward of each token, float64 [T]: less its cost, and the response's own at its last trained token.

    Args:
        reward: of the response.
        costs: [T], subtracted from the reward of each token.
        mask: bool [T], trained tokens; the reward of other tokens is 0.
    """
    rewards = np.where(mask, -costs.astype(np.float64), 0.0)
    if mask.any():
        rewards[int(np.flatnonzero(mask)[-1])] += reward
    return rewards


def credit_by_token(advantage: float, costs: np.ndarray, mask: np.ndarray, gamma: float) -> np.ndarray:
    """gamma^(last - t) A - sum_{k >= t} gamma^(k - t) m_k c_k, the return of each token, float32 [T].

    Args:
        advantage: of the response, earned at its last trained token.
        costs: [T], subtracted from the reward of each token.
        mask: bool [T]; costs of other tokens count 0.
    """
    rewards = token_rewards(advantage, costs, mask)
    if gamma == 1.0:
        return np.cumsum(rewards[::-1])[::-1].astype(np.float32)
    returns, following = np.zeros(len(mask)), 0.0
    for t in range(len(mask) - 1, -1, -1):
        following = rewards[t] + gamma * following
        returns[t] = following
    return returns.astype(np.float32)
