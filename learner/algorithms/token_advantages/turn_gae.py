"""Generalised advantage estimation whose decisions are whole turns of an episode."""

from __future__ import annotations

import numpy as np

from mobula.learner.algorithms.token_advantages.gae import estimated
from mobula.learner.algorithms.token_advantages.inputs import TokenCredit, TokenValues
from mobula.learner.algorithms.turns import turns_of


def turn_gae(response: TokenValues, gamma: float, gae_lambda: float) -> TokenCredit:
    """A_k = sum_{j >= k} (gamma gae_lambda)^(j - k) d_j with d_j = r_j + gamma V_{j+1} - V_j over the turns j = 1..n:
    r_j is the sum of the rewards of the tokens of turn j, V_j the value before its first one.

    Every token of turn k has the advantage A_k and the return A_k + V_k.

    Source: the turn level of VAGEN's bi-level estimator (bi-level GAE), arXiv:2510.16907.
    """
    advantages, returns = np.zeros(len(response.mask)), np.zeros(len(response.mask))
    turns = turns_of(response.mask)
    if turns:
        rewards = np.array([response.rewards[start:end].sum() for start, end in turns])
        values = response.values[[start for start, _ in turns]].astype(np.float64)
        turn_advantages = estimated(rewards, values, response.end_value, gamma, gae_lambda)
        for (start, end), advantage, value in zip(turns, turn_advantages, values, strict=True):
            advantages[start:end], returns[start:end] = advantage, advantage + value
    return TokenCredit(advantages, returns)
