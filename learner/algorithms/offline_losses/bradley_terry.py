"""The pairwise loss of reward models."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry(chosen: Tensor, rejected: Tensor, *, margin: float = 0.0) -> Tensor:
    """-log sigmoid(chosen - rejected - margin): without a margin, minus the log-likelihood that the chosen answer wins.

    Sources: InstructGPT, arXiv:2203.02155, equation 1; the margin, Touvron et al., arXiv:2307.09288, eq. 2.
    """
    return -logsigmoid(chosen - rejected - margin)
