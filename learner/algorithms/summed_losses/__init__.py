"""Losses that are summed over tokens, as the Tinker API defines them. One formula a file; a call names its loss."""

from __future__ import annotations

from mobula.learner.algorithms.summed_losses.base import SummedLoss
from mobula.learner.algorithms.summed_losses.cispo import cispo
from mobula.learner.algorithms.summed_losses.cross_entropy import cross_entropy
from mobula.learner.algorithms.summed_losses.dro import dro
from mobula.learner.algorithms.summed_losses.importance_sampling import importance_sampling
from mobula.learner.algorithms.summed_losses.ppo import ppo

OF_POLICY = ("logprobs", "advantages")  # log-probs of the sampling policy

SUMMED_LOSSES: dict[str, SummedLoss] = {
    "cross_entropy": SummedLoss(("weights",), cross_entropy, takes_several_targets=True),
    "importance_sampling": SummedLoss(OF_POLICY, importance_sampling),
    "ppo": SummedLoss(OF_POLICY, ppo),
    "cispo": SummedLoss(OF_POLICY, cispo),
    "dro": SummedLoss(OF_POLICY, dro),
}

__all__ = ["SUMMED_LOSSES", "SummedLoss"]
