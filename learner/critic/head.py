"""ScalarHead: one number from each hidden state of a model."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ScalarHead(nn.Module):
    """The inner product of a state with a learned vector, in float32 and without a bias.

    It starts from N(0, 1 / (H + 1)^2), so that values are near 0 at first. Every rank draws the same numbers from
    `seed`, and the generators of the process stay as they are.

    Source: Learning to Summarize from Human Feedback, arXiv:2009.01325, appendix B.1.
    """

    def __init__(self, hidden_size: int, seed: int) -> None:
        super().__init__()
        drawn = torch.randn(1, hidden_size, generator=torch.Generator().manual_seed(seed))
        self.weight = nn.Parameter(drawn / (hidden_size + 1))  # [1, H], the layout of a linear layer

    def forward(self, states: Tensor) -> Tensor:
        """states [..., H] of any float type -> float32 [...]."""
        return (states.float() * self.weight[0].float()).sum(dim=-1)
