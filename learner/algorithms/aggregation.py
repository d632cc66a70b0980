"""From values a token to one number.

The denominators are those of the whole minibatch, over all micro-batches and ranks; the parts then simply add up, and
no split changes the gradient. A masked value is never looked at, so it may be anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Totals:
    """What a whole minibatch holds: trained tokens, and responses with at least one of them."""

    num_tokens: int
    num_sequences: int


def token_mean(values: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """sum_bt m v / num_tokens: every trained token weighs the same (DAPO, arXiv:2503.14476, section 3.3)."""
    return torch.where(mask, values, 0.0).sum() / max(totals.num_tokens, 1)


def sequence_mean(values: Tensor, mask: Tensor, totals: Totals) -> Tensor:
    """sum_b (sum_t m v / sum_t m) / num_sequences: every response weighs the same (GRPO, arXiv:2402.03300, eq. 3)."""
    lengths = mask.sum(dim=1).clamp(min=1)
    return (torch.where(mask, values, 0.0).sum(dim=1) / lengths).sum() / max(totals.num_sequences, 1)


AGGREGATIONS: dict[str, Callable[[Tensor, Tensor, Totals], Tensor]] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
}
