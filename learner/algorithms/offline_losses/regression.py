"""The loss of reward models that predict a given score."""

from __future__ import annotations

from torch import Tensor


def regression(scores: Tensor, labels: Tensor) -> Tensor:
    """(score - label)^2. Source: HelpSteer2, arXiv:2406.08673, section 4.1."""
    return (scores - labels) ** 2
