"""GSPO: one ratio for the whole response."""

from __future__ import annotations

from torch import Tensor

from mobula.learner.algorithms.policy_losses.base import PolicyLoss, clipped_surrogate, sequence_mean_of
from mobula.learner.algorithms.ratios import log_ratio


def gspo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) on every token, s = exp(mean_t(logprobs - old_logprobs)).

    With `sequence_mean` this is the paper's mean over responses.

    Source: Group Sequence Policy Optimization, arXiv:2507.18071, equations 5 and 7.
    """
    log_ratios = log_ratio(logprobs, old_logprobs)
    ratio = sequence_mean_of(log_ratios, mask).exp().expand_as(logprobs)
    return clipped_surrogate(ratio, advantages, clip_low, clip_high)


def gspo_token(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """GSPO with the gradient of each token's own log-prob: s_t = sg(s) * p_t / sg(p_t), of the same value as s.

    Equal to GSPO where all tokens of a response have one advantage and the aggregation is `sequence_mean`; lets
    advantages differ by token.

    Source: Group Sequence Policy Optimization, arXiv:2507.18071, equations 13 and 14.
    """
    log_ratios = log_ratio(logprobs, old_logprobs)
    sequence = sequence_mean_of(log_ratios, mask).exp().detach()
    # The second factor is 1: it gives each token its own gradient and leaves the value.
    ratio = sequence * (logprobs - logprobs.detach()).exp()
    return clipped_surrogate(ratio, advantages, clip_low, clip_high)
