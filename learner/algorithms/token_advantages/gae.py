"""Generalised advantage estimation."""

from __future__ import annotations

import numpy as np

from mobula.learner.algorithms.token_advantages.inputs import TokenCredit, TokenValues


def gae(response: TokenValues, gamma: float, gae_lambda: float) -> TokenCredit:
    """A_k = sum_{j >= k} (gamma gae_lambda)^(j - k) d_j with d_j = r_j + gamma V_{j+1} - V_j over the trained tokens
    j = 1..n of the response.

    V_{j+1} is the value before the next trained token, so that what an environment wrote in between is skipped. After
    the last trained token it is 0 for a response that has ended, and the value of the state after the response for one
    that was truncated. The return is the advantage plus the value.

    Source: Schulman et al., arXiv:1506.02438, equation 16.
    """
    advantages, returns = np.zeros(len(response.mask)), np.zeros(len(response.mask))
    values = response.values[:-1][response.mask].astype(np.float64)
    if values.size > 0:
        found = estimated(response.rewards[response.mask], values, response.end_value, gamma, gae_lambda)
        advantages[response.mask], returns[response.mask] = found, found + values
    return TokenCredit(advantages, returns)


def estimated(rewards: np.ndarray, values: np.ndarray, end_value: float, gamma: float, gae_lambda: float) -> np.ndarray:
    """The advantages of n decisions: their rewards and the values before them are [n], `end_value` is that behind."""
    from scipy.signal import lfilter  # which only runs with a critic need

    differences = rewards + gamma * np.append(values[1:], end_value) - values
    # a recursive filter from the end: y_k = d_k + gamma gae_lambda y_{k+1}
    return lfilter([1.0], [1.0, -gamma * gae_lambda], differences[::-1])[::-1]
