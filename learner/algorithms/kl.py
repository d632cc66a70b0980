"""KL to the reference policy and to a teacher: estimators, the controlled coefficient, on-policy distillation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from mobula.cluster.user_code import chosen
from mobula.configs.schema import KLConfig
from mobula.learner.algorithms.policy_losses import log_ratio

KLEstimator = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`(logprobs, reference_logprobs, behavior_logprobs)`, all [B, T], to KL(policy || reference) a token [B, T]. Tokens
were sampled by the behaviour policy. The first three estimators are those of Schulman, Approximating KL Divergence,
joschu.net/blog/kl-approx.html; they read no behaviour log-probs."""


def capped(kl: Tensor, cap: float) -> Tensor:
    """Token values held within -cap and cap; a cap of 0 sets no bound."""
    return kl.clamp(-cap, cap) if cap > 0 else kl


def k1(logprobs: Tensor, reference_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """log p - log q: unbiased, high variance, may be negative. As a loss its expected gradient is 0."""
    return logprobs - reference_logprobs


def k2(logprobs: Tensor, reference_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """(log p - log q)^2 / 2: biased, low variance; as a loss its gradient is that of the KL."""
    return (logprobs - reference_logprobs).square() / 2


def k3(logprobs: Tensor, reference_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """q/p - 1 - log(q/p): unbiased, low variance, never negative; GRPO's choice (arXiv:2402.03300, equation 4)."""
    difference = log_ratio(reference_logprobs, logprobs)
    return difference.expm1() - difference


def k3_importance(logprobs: Tensor, reference_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """p/b (q/p - 1 - log(q/p)): k3 for tokens that policy b sampled. The gradient goes through p/b too, so that value
    and gradient are both unbiased.

    Source: DeepSeek-V3.2, arXiv:2512.02556, section 3.1.
    """
    return log_ratio(logprobs, behavior_logprobs).exp() * k3(logprobs, reference_logprobs, behavior_logprobs)


MAX_ERROR = 0.2  # of the relative error that one step answers to


class KLCoefficient(Protocol):
    """Interface of KL coefficients."""

    value: float

    def observe(self, kl: float, num_responses: int) -> None:
        """Updates the coefficient with the KL (nat per token) of one step of `num_responses` responses."""


class FixedCoefficient:
    """A constant coefficient."""

    def __init__(self, value: float) -> None:
        self.value = value

    def observe(self, kl: float, num_responses: int) -> None:
        """Ignores the KL."""


class AdaptiveCoefficient:
    """value <- value (1 + clip(kl / target - 1, -0.2, 0.2) n / horizon) after a step of n responses.

    Source: Fine-Tuning Language Models from Human Preferences, arXiv:1909.08593, section 2.2.
    """

    def __init__(self, value: float, *, target: float, horizon: float) -> None:
        self.value = value
        self._target = target
        self._horizon = horizon

    def observe(self, kl: float, num_responses: int) -> None:
        error = min(max(kl / self._target - 1, -MAX_ERROR), MAX_ERROR)
        self.value *= 1 + error * num_responses / self._horizon


KL_ESTIMATORS: dict[str, KLEstimator] = {"k1": k1, "k2": k2, "k3": k3, "k3_importance": k3_importance}


def kl_estimator(config: KLConfig) -> KLEstimator:
    """Returns the estimator of `algorithm.kl.estimator`."""
    given = ("logprobs", "reference_logprobs", "behavior_logprobs")
    return chosen(KL_ESTIMATORS, config.estimator, "algorithm.kl.estimator", given, config.estimator_options)


# On-policy distillation: how much likelier the teacher finds a sampled token than the policy does.
#
# Both forms descend the reverse KL(policy || teacher) of each position, estimated by its sampled token: log p - log q
# for the policy p and the teacher q. Sources: GKD, arXiv:2306.13649, section 3; Thinking Machines, On-Policy
# Distillation, 2025, thinkingmachines.ai/blog/on-policy-distillation.


def teacher_advantage(behavior_logprobs: Tensor, teacher_logprobs: Tensor, cap: float) -> Tensor:
    """log q - log b of each token, b the policy that sampled it; within -cap and cap unless cap is 0. Any shape.

    A token is credited with its own position alone: the discount of later ones is 0.
    """
    return capped(teacher_logprobs - behavior_logprobs, cap)


def reverse_kl(logprobs: Tensor, teacher_logprobs: Tensor, behavior_logprobs: Tensor, cap: float) -> Tensor:
    """p/b sg(log p - log q) of each token, the log-ratio within -cap and cap unless cap is 0.

    Without a cap, value and gradient are unbiased for KL(p || q) over tokens that b sampled. The gradient of log p
    inside the bracket is left out: its expectation is 0.
    """
    return log_ratio(logprobs, behavior_logprobs).exp() * capped(logprobs.detach() - teacher_logprobs, cap)
