"""The logistic loss of direct preference optimisation."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def sigmoid(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """-(1 - e) log sigmoid(m) - e log sigmoid(-m) with m = beta (chosen - rejected) and e = `label_smoothing`.

    Sources: DPO, arXiv:2305.18290, equation 7; the smoothing is that of conservative DPO (Mitchell, 2023).
    """
    margin = beta * (chosen - rejected)
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
