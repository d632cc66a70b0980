"""Policy losses by the name in `algorithm.loss`, their ratios, and the aggregation of tokens to one number."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp(20) is far outside every clip range and still finite


def bounded(values: Tensor) -> Tensor:
    """Log-ratios held within -MAX_LOG_RATIO and MAX_LOG_RATIO, so that their exponential is finite."""
    return values.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def log_ratio(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """logprobs - other_logprobs, bounded. Any shape."""
    return bounded(logprobs - other_logprobs)


# From token values to one number.
#
# The denominators are those of the whole minibatch, over all micro-batches and ranks: the parts add up, and no split
# changes the gradient. A masked value is never read, so it may be anything. `norm` is `algorithm.loss_norm`; the
# means do not read it.


@dataclass(frozen=True)
class Totals:
    """Counts of a whole minibatch: trained tokens, and responses with at least one of them."""

    num_tokens: int
    num_sequences: int


def token_mean(values: Tensor, mask: Tensor, totals: Totals, norm: float = 1.0) -> Tensor:
    """sum_bt m v / num_tokens: every trained token weighs the same (DAPO, arXiv:2503.14476, section 3.3)."""
    # `where`, not a product: an infinite or NaN value behind the mask would survive a factor 0.
    return torch.where(mask, values, 0.0).sum() / max(totals.num_tokens, 1)


def sequence_mean(values: Tensor, mask: Tensor, totals: Totals, norm: float = 1.0) -> Tensor:
    """sum_b (sum_t m v / sum_t m) / num_sequences: every response weighs the same (GRPO, arXiv:2402.03300, eq. 3)."""
    lengths = mask.sum(dim=1).clamp(min=1)
    return (torch.where(mask, values, 0.0).sum(dim=1) / lengths).sum() / max(totals.num_sequences, 1)


def sequence_sum_token_norm(values: Tensor, mask: Tensor, totals: Totals, norm: float) -> Tensor:
    """sum_bt m v / (norm num_sequences): no response's length divides its own loss (Dr. GRPO, arXiv:2503.20783,
    section 3.2, whose constant is the longest response)."""
    return torch.where(mask, values, 0.0).sum() / (norm * max(totals.num_sequences, 1))


def constant(values: Tensor, mask: Tensor, totals: Totals, norm: float) -> Tensor:
    """sum_bt m v / norm: neither lengths nor the number of responses divide anything."""
    return torch.where(mask, values, 0.0).sum() / norm


Aggregation = Callable[[Tensor, Tensor, Totals, float], Tensor]
"""`(values [B, T], mask [B, T], totals, norm)` to one number; `norm` is `algorithm.loss_norm`."""


AGGREGATIONS: dict[str, Aggregation] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_sum_token_norm": sequence_sum_token_norm,
    "constant": constant,
}


class PolicyLoss(NamedTuple):
    """A policy loss, token by token. What lies outside the mask may be anything."""

    loss: Tensor  # [B, T]
    ratio: Tensor  # [B, T], detached
    is_clipped: Tensor  # bool [B, T]: the clip holds the gradient of this token back


PolicyLossFunction = Callable[..., PolicyLoss]
"""`(logprobs, old_logprobs, advantages, mask, **parameters)`, all [B, T]; the parameters are those of
`algorithm.losses.NAME`. `logprobs` are of the trained policy, `old_logprobs` of the policy that the ratio is taken
to; `mask` is True on trained tokens."""


def sequence_mean_of(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over each row's trained tokens, [B, T] -> [B, 1]; 0 for a row without any."""
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(mask, values, 0.0).sum(dim=1, keepdim=True) / lengths


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> PolicyLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)."""
    free = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return PolicyLoss(-torch.minimum(free, clipped), ratio.detach(), (clipped < free).detach())


def ppo_clip(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logprobs - old_logprobs).

    Source: PPO, arXiv:1707.06347, equation 7; two clip bounds: DAPO, arXiv:2503.14476, section 3.1.
    """
    return clipped_surrogate(log_ratio(logprobs, old_logprobs).exp(), advantages, clip_low, clip_high)


def dual_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    bound: float,
) -> PolicyLoss:
    """PPO's loss; where A < 0, at most -bound * A.

    Source: Mastering Complex Control in MOBA Games, arXiv:1912.09729.
    """
    once = ppo_clip(logprobs, old_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high)
    most = -bound * advantages
    is_bounded = (advantages < 0) & (once.loss > most)
    return PolicyLoss(torch.where(is_bounded, most, once.loss), once.ratio, once.is_clipped | is_bounded.detach())


def cispo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprobs with r = exp(logprobs - old_logprobs).

    `clip_low=1` sets no lower bound, as in the paper.

    Source: MiniMax-M1, arXiv:2506.13585, equations 4 and 5.
    """
    ratio = log_ratio(logprobs, old_logprobs).exp().detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return PolicyLoss(-weight * advantages * logprobs, ratio, weight != ratio)


def gspo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) on every token, s = exp(mean_t(logprobs - old_logprobs)).

    With `sequence_mean` this is the paper's mean over responses.

    Source: Group Sequence Policy Optimization, arXiv:2507.18071, equations 5 and 7.
    """
    ratio = sequence_mean_of(log_ratio(logprobs, old_logprobs), mask).exp().expand_as(logprobs)
    return clipped_surrogate(ratio, advantages, clip_low, clip_high)


def gspo_token(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """GSPO with the gradient of each token's own log-prob: s_t = sg(s) * p_t / sg(p_t), of the same value as s.

    Equal to GSPO where all tokens of a response have one advantage and the aggregation is `sequence_mean`; lets
    advantages differ by token.

    Source: Group Sequence Policy Optimization, arXiv:2507.18071, equations 13 and 14.
    """
    sequence = sequence_mean_of(log_ratio(logprobs, old_logprobs), mask).exp().detach()
    # The second factor is 1: it gives each token its own gradient and leaves the value.
    ratio = sequence * (logprobs - logprobs.detach()).exp()
    return clipped_surrogate(ratio, advantages, clip_low, clip_high)


def gmpo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """-A exp(mean_t c_t) on every token, with d_t = logprobs - old_logprobs and

        c_t = min(d_t, clip_high) where A >= 0, max(d_t, -clip_low) where A < 0.

    The bounds are of the logarithm: 0.4 is the paper's range (e^-0.4, e^0.4). With `sequence_mean` this is the paper's
    mean over responses.

    Source: Geometric-Mean Policy Optimization, arXiv:2507.20673.
    """
    difference = log_ratio(logprobs, old_logprobs)
    clipped = torch.where(advantages >= 0, difference.clamp(max=clip_high), difference.clamp(min=-clip_low))
    ratio = sequence_mean_of(clipped, mask).exp().expand_as(logprobs)
    return PolicyLoss(-ratio * advantages, ratio.detach(), (clipped != difference).detach())


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    temperature_positive: float,
    temperature_negative: float,
) -> PolicyLoss:
    """-(4 / k) sigmoid(k (r - 1)) A with r = exp(logprobs - old_logprobs), k the temperature for the sign of A.

    The gradient at r = 1 is that of r A, and falls off smoothly on both sides.

    Source: Soft Adaptive Policy Optimization, arXiv:2511.20347.
    """
    ratio = log_ratio(logprobs, old_logprobs).exp()
    positive, negative = torch.full_like(ratio, temperature_positive), torch.full_like(ratio, temperature_negative)
    temperature = torch.where(advantages > 0, positive, negative)
    gate = (temperature * (ratio - 1)).sigmoid() * 4 / temperature
    return PolicyLoss(-gate * advantages, ratio.detach(), torch.zeros_like(mask))


def cpg(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    drift: float,
) -> PolicyLoss:
    """-min(d A, clip(d, log(1 - clip_low), log(1 + clip_high)) A) + drift (exp(d) - 1 - d).

    With d = logprobs - old_logprobs. The gradient of the first term inside the range is -A, however large the ratio is:
    a ratio above 1 amplifies nothing. The second term estimates KL(old policy || policy) from samples of the old one.

    Source: CPGD, arXiv:2505.12504.
    """
    difference = log_ratio(logprobs, old_logprobs)
    free = difference * advantages
    clipped = difference.clamp(math.log1p(-clip_low), math.log1p(clip_high)) * advantages
    drifted = drift * (difference.expm1() - difference)
    return PolicyLoss(drifted - torch.minimum(free, clipped), difference.detach().exp(), (clipped < free).detach())


def reinforce(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> PolicyLoss:
    """-A logprobs. Source: Williams, 1992, doi:10.1007/BF00992696."""
    ratio = log_ratio(logprobs, old_logprobs).detach().exp()
    return PolicyLoss(-advantages * logprobs, ratio, torch.zeros_like(mask))


POLICY_LOSSES: dict[str, PolicyLossFunction] = {
    "ppo_clip": ppo_clip,
    "dual_clip": dual_clip,
    "cpg": cpg,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "reinforce": reinforce,
}
