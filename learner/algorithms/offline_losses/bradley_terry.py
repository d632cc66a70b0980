"""The pairwise loss of reward models."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log sigmoid(chosen - rejected), the negative log-likelihood that the chosen answer wins.

    Source: InstructGPT, arXiv:2203.02155, equation 1.
    """
    return -logsigmoid(chosen - rejected)
