"""On-policy distillation: how much likelier the teacher finds a sampled token than the policy does.

Both forms descend the reverse KL(policy || teacher) of each position, estimated by its sampled token: log p - log q for
the policy p and the teacher q. Sources: GKD, arXiv:2306.13649, section 3; Thinking Machines, On-Policy Distillation,
2025, thinkingmachines.ai/blog/on-policy-distillation.
"""

from __future__ import annotations

from torch import Tensor

from mobula.learner.algorithms.kl.base import capped
from mobula.learner.algorithms.ratios import log_ratio


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
    weight = log_ratio(logprobs, behavior_logprobs).exp()
    return weight * capped(logprobs.detach() - teacher_logprobs, cap)
