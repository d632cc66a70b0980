"""Advantages of tokens and of turns, and the loss of the critic's values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenValues:
    """One response of T tokens. Tokens that are not trained (of an environment, between turns) are no decisions."""

    rewards: np.ndarray  # float [T], after each token
    values: np.ndarray  # float [T + 1]: of the state before each token, and of the state after the last one
    mask: np.ndarray  # bool [T], trained tokens
    is_truncated: bool  # cut at the length limit: what would have followed is worth the last value, and else 0

    @property
    def end_value(self) -> float:
        """The value of what follows the last trained token."""
        return float(self.values[-1]) if self.is_truncated else 0.0


class TokenCredit(NamedTuple):
    """Both are 0 on tokens that are not trained."""

    advantages: np.ndarray  # float64 [T]
    returns: np.ndarray  # float64 [T], what the critic is trained on


TokenAdvantage = Callable[[TokenValues, float, float], TokenCredit]
"""`(response, gamma, gae_lambda)` to the credit of its tokens."""


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


def turns_of(mask: np.ndarray) -> list[tuple[int, int]]:
    """[start, end) of every run of True, in order; a response of one turn is one run.

    Args:
        mask: bool [T], trained tokens.

    Example:
        >>> turns_of(np.array([True, True, False, True]))
        [(0, 2), (3, 4)]
    """
    changes = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return list(zip(changes[::2].tolist(), changes[1::2].tolist(), strict=True))


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


TOKEN_ADVANTAGES: dict[str, TokenAdvantage] = {"gae": gae, "turn_gae": turn_gae}


@dataclass(frozen=True)
class StepTurns:
    """All N episodes of a step. Siblings have equal group ids, wherever they stand.

    An episode that is not included has no reward. It takes no part in any statistic and gets advantages of 0.
    """

    rewards: np.ndarray  # float [N, K], of turn k; 0 behind the last turn of an episode
    num_turns: np.ndarray  # int [N]
    included: np.ndarray  # bool [N]
    group_ids: np.ndarray  # int [N]


TurnAdvantage = Callable[[StepTurns, float], np.ndarray]
"""`(turns, discount)` to advantages, float64 [N, K]; 0 behind the last turn of an episode."""


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


TURN_ADVANTAGES: dict[str, TurnAdvantage] = {"return_to_go": return_to_go}


class ValueLoss(NamedTuple):
    """The loss of each token, and where the clip holds its gradient back."""

    loss: Tensor  # [B, T]
    is_clipped: Tensor  # bool [B, T]


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> ValueLoss:
    """max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2) / 2 of each token; all [B, T]. A clip of 0 sets no
    bound.

    Source: the reference implementation of PPO, arXiv:1707.06347; Engstrom et al., arXiv:2005.12729, section 3.
    """
    plain = (values - returns).square()
    if clip == 0:
        return ValueLoss(plain / 2, torch.zeros_like(plain, dtype=torch.bool))
    moved = values - old_values
    clipped = (old_values + moved.clamp(-clip, clip) - returns).square()
    is_clipped = (moved.abs() > clip) & (clipped > plain)
    return ValueLoss(torch.where(is_clipped, clipped, plain) / 2, is_clipped)


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    """1 - var(R - V) / var(R) over tokens [N], in float64; 0 where all returns are equal, NaN where one is not finite.

    1 is a perfect critic, 0 no better than a constant, and below 0 worse than that.
    """
    if not (np.isfinite(values).all() and np.isfinite(returns).all()):
        return math.nan
    if values.size == 0 or returns.min() == returns.max():
        return 0.0
    returns = returns.astype(np.float64)
    return float(1 - (returns - values).var() / returns.var())
