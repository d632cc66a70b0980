"""Losses of offline jobs, row by row. One formula a file; `offline.dpo.loss` and `offline.reward_model.loss` choose."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mobula.learner.algorithms.offline_losses.bradley_terry import bradley_terry
from mobula.learner.algorithms.offline_losses.ipo import ipo
from mobula.learner.algorithms.offline_losses.regression import regression
from mobula.learner.algorithms.offline_losses.sigmoid import sigmoid

PreferenceLoss = Callable[..., Tensor]
"""`(chosen, rejected, *, beta, label_smoothing)`: log-ratios [N] of the trained policy to the initial one -> [N]."""

PREFERENCE_LOSSES: dict[str, PreferenceLoss] = {"sigmoid": sigmoid, "ipo": ipo}

ScoreLoss = Callable[..., Tensor]
"""`bradley_terry`: scores [N] of chosen and rejected answers, and `margin` -> [N];
`regression`: scores [N] and labels [N] -> [N]."""

SCORE_LOSSES: dict[str, ScoreLoss] = {"bradley_terry": bradley_terry, "regression": regression}

__all__ = ["PREFERENCE_LOSSES", "SCORE_LOSSES", "PreferenceLoss", "ScoreLoss"]
