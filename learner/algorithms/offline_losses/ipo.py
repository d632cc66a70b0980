"""The squared loss of identity preference optimisation."""

from __future__ import annotations

from torch import Tensor


def ipo(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """(chosen - rejected - 1 / (2 beta))^2. There is no label smoothing; `label_smoothing` is not read.

    The log-ratios are sums over the tokens of an answer, as in the paper. Source: IPO, arXiv:2310.12036, equation 17.
    """
    return (chosen - rejected - 1 / (2 * beta)) ** 2
