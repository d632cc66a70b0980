"""Estimators of KL(policy || reference), token by token. One formula a file; `algorithm.kl.estimator` chooses."""

from __future__ import annotations

from mobula.cluster.user_code import chosen
from mobula.configs.schema import KLConfig
from mobula.learner.algorithms.kl.base import KLEstimator
from mobula.learner.algorithms.kl.coefficient import AdaptiveCoefficient, FixedCoefficient, KLCoefficient
from mobula.learner.algorithms.kl.k1 import k1
from mobula.learner.algorithms.kl.k2 import k2
from mobula.learner.algorithms.kl.k3 import k3, k3_importance

KL_ESTIMATORS: dict[str, KLEstimator] = {"k1": k1, "k2": k2, "k3": k3, "k3_importance": k3_importance}


def kl_estimator(config: KLConfig) -> KLEstimator:
    """Returns the estimator of `algorithm.kl.estimator`."""
    given = ("logprobs", "reference_logprobs", "behavior_logprobs")
    return chosen(KL_ESTIMATORS, config.estimator, "algorithm.kl.estimator", given, config.estimator_options)


__all__ = ["KL_ESTIMATORS", "AdaptiveCoefficient", "FixedCoefficient", "KLCoefficient", "KLEstimator", "kl_estimator"]
