"""Policy-gradient losses a token. One formula a function."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) is far outside every clip range and still finite


class PolicyLoss(NamedTuple):
    """What a policy loss says about each token."""

    loss: Tensor  # [B, T]
    ratio: Tensor  # [B, T], detached
    is_clipped: Tensor  # bool [B, T]: the clip holds the gradient of this token back


def clipped_surrogate(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logprobs - old_logprobs), a token.

    Args:
        logprobs: [B, T], of the policy that is trained.
        old_logprobs: [B, T], of the policy that sampled.
        advantages: [B, T], or [B, 1] for one number a response.

    Source: PPO, arXiv:1707.06347, equation 7; two clip bounds: DAPO, arXiv:2503.14476, section 3.1.
    """
    ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    free = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return PolicyLoss(-torch.minimum(free, clipped), ratio.detach(), (clipped < free).detach())
