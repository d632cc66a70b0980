"""Weights of tokens that are older than the staleness bound. One formula a function, one value a token.

Dropping a whole response because its first tokens are old favours short answers, since long answers take longer to
sample. So each token has an age: old tokens leave the loss, or get an importance weight under the current policy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mobula.learner.algorithms.ratios import log_ratio


def truncated_importance(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, weight_cap: float) -> Tensor:
    """-w A logprobs with the constant w = min(exp(logprobs - old_logprobs), weight_cap): REINFORCE on tokens of another
    policy. A clipped ratio would give old tokens no gradient at all where the two policies differ; here none is lost,
    and the cap bounds the variance.

    Args:
        logprobs: [B, T], of the policy that is trained.
        old_logprobs: [B, T], of the policy that sampled.
        advantages: [B, T], or [B, 1] for one number a response.

    Source: the truncated weights of IMPALA, arXiv:1802.01561, section 4.1; as a loss of tokens: CISPO,
    arXiv:2506.13585.
    """
    ratio = log_ratio(logprobs, old_logprobs).detach().exp()
    return -ratio.clamp(max=weight_cap) * advantages * logprobs


def by_age(loss: Tensor, over_age_loss: Tensor, ages: Tensor, *, max_staleness: int, max_age: int) -> Tensor:
    """`loss` up to an age of `max_staleness`, `over_age_loss` up to `max_age`, 0 beyond; all [B, T].

    Tokens with loss 0 count in the denominators of means: excluding them would raise the weight of other tokens.
    """
    aged = torch.where(ages > max_staleness, over_age_loss, loss)
    return torch.where(ages > max_age, 0.0, aged)
