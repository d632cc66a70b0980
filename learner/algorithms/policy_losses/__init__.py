"""Policy-gradient losses, token by token. One formula a file; `algorithm.loss` chooses."""

from __future__ import annotations

from mobula.learner.algorithms.policy_losses.base import PolicyLoss, PolicyLossFunction
from mobula.learner.algorithms.policy_losses.cispo import cispo
from mobula.learner.algorithms.policy_losses.cpg import cpg
from mobula.learner.algorithms.policy_losses.dual_clip import dual_clip
from mobula.learner.algorithms.policy_losses.gmpo import gmpo
from mobula.learner.algorithms.policy_losses.gspo import gspo, gspo_token
from mobula.learner.algorithms.policy_losses.ppo_clip import ppo_clip
from mobula.learner.algorithms.policy_losses.reinforce import reinforce
from mobula.learner.algorithms.policy_losses.sapo import sapo

POLICY_LOSSES: dict[str, PolicyLossFunction] = {
    "ppo_clip": ppo_clip,
    "dual_clip": dual_clip,
    "cpg": cpg,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "reinforce": reinforce,
}

__all__ = ["POLICY_LOSSES", "PolicyLoss", "PolicyLossFunction"]
