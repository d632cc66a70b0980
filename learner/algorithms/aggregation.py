"""From token values to one number.

The denominators are those of the whole minibatch, over all micro-batches and ranks: the parts add up, and no split
changes the gradient. A masked value is never read, so it may be anything. `norm` is `algorithm.loss_norm`; the means do
not read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


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
    section 3.2, whose constant is the longest response).
    """
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
