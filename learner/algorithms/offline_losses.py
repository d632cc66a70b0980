"""Losses of preference pairs and of scored rows, by the name in `offline.loss`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def sigmoid(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """-(1 - e) log sigmoid(m) - e log sigmoid(-m) with m = beta (chosen - rejected) and e = `label_smoothing`.

    Sources: DPO, arXiv:2305.18290, equation 7; the smoothing is that of conservative DPO (Mitchell, 2023).
    """
    margin = beta * (chosen - rejected)
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def ipo(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """(chosen - rejected - 1 / (2 beta))^2. There is no label smoothing; `label_smoothing` is not read.

    The log-ratios are sums over the tokens of an answer, as in the paper. Source: IPO, arXiv:2310.12036, equation 17.
    """
    return (chosen - rejected - 1 / (2 * beta)) ** 2


def bradley_terry(chosen: Tensor, rejected: Tensor, *, margin: float = 0.0) -> Tensor:
    """-log sigmoid(chosen - rejected - margin): without a margin, minus the log-likelihood that the chosen answer wins.

    Sources: InstructGPT, arXiv:2203.02155, equation 1; the margin, Touvron et al., arXiv:2307.09288, eq. 2.
    """
    return -logsigmoid(chosen - rejected - margin)


def kto(
    ratios: Tensor, is_desirable: Tensor, *, divergence: float, beta: float, weights: tuple[float, float]
) -> Tensor:
    """w+ (1 - sigmoid(beta (r - z))) of desirable answers, w- (1 - sigmoid(beta (z - r))) of undesirable ones, for
    log-ratios r [N], the divergence z and `weights` (w+, w-). Source: KTO, arXiv:2402.01306, equation 8.
    """
    margin = beta * (ratios - divergence)
    desirable, undesirable = weights
    return desirable * is_desirable * torch.sigmoid(-margin) + undesirable * ~is_desirable * torch.sigmoid(margin)


def regression(scores: Tensor, labels: Tensor) -> Tensor:
    """(score - label)^2. Source: HelpSteer2, arXiv:2406.08673, section 4.1."""
    return (scores - labels) ** 2


PreferenceLoss = Callable[..., Tensor]
"""`(chosen, rejected, *, beta, label_smoothing)`: log-ratios [N] of the trained policy to the initial one -> [N]."""


PREFERENCE_LOSSES: dict[str, PreferenceLoss] = {"sigmoid": sigmoid, "ipo": ipo}
ScoreLoss = Callable[..., Tensor]
"""`bradley_terry`: scores [N] of chosen and rejected answers, and `margin` -> [N];
`regression`: scores [N] and labels [N] -> [N]."""


SCORE_LOSSES: dict[str, ScoreLoss] = {"bradley_terry": bradley_terry, "regression": regression}
