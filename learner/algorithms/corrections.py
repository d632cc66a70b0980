"""Corrections of the gap between the policy that sampled and the policy that is trained."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mobula.learner.algorithms.policy_losses import bounded, log_ratio

CorrectionFunction = Callable[..., Tensor]
"""`(proximal_logprobs, behavior_logprobs, mask, **parameters)`, all [B, T], to constant weights [B, T] of the policy
loss; the parameters are those of `algorithm.corrections.NAME`. A weight of 0 rejects a token, which still counts where
a mean is taken: otherwise the kept tokens would grow with the share that is rejected."""


def token_ratio(proximal_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """exp(proximal - behaviour) [B, T], a constant. A difference that is not finite counts as none."""
    return bounded(_difference(proximal_logprobs, behavior_logprobs)).exp()


def sequence_ratio(proximal_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> Tensor:
    """exp(sum over the row's trained tokens of proximal - behaviour) [B, T], a constant."""
    difference = _difference(proximal_logprobs, behavior_logprobs)
    total = torch.where(mask, difference, 0.0).sum(dim=1, keepdim=True)
    return bounded(total).exp().expand_as(difference)


def _difference(proximal_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    return torch.nan_to_num(proximal_logprobs - behavior_logprobs, nan=0.0, posinf=0.0, neginf=0.0).detach()


def none(proximal_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> Tensor:
    """w = 1."""
    return torch.ones_like(behavior_logprobs)


def tis_token(proximal_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, *, cap: float) -> Tensor:
    """w_t = min(p_prox / b, cap).

    Source: Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training,
    fengyao.notion.site/off-policy-rl.
    """
    return token_ratio(proximal_logprobs, behavior_logprobs).clamp(max=cap)


def tis_sequence(proximal_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, *, cap: float) -> Tensor:
    """w = min(prod_t p_prox / b, cap) on every token of a response.

    Source: Liu et al. 2025, When Speed Kills Stability.
    """
    return sequence_ratio(proximal_logprobs, behavior_logprobs, mask).clamp(max=cap)


def icepop(proximal_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, *, low: float, high: float) -> Tensor:
    """w_t = p_prox / b where that is within [low, high], else 0.

    Source: Every Step Evolves (Ring-1T), arXiv:2510.18855.
    """
    ratio = token_ratio(proximal_logprobs, behavior_logprobs)
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def mis(proximal_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, *, cap: float) -> Tensor:
    """w = prod_t p_prox / b on every token of a response where that is at most `cap`, else 0.

    Source: Liu et al. 2025, When Speed Kills Stability.
    """
    ratio = sequence_ratio(proximal_logprobs, behavior_logprobs, mask)
    return torch.where(ratio <= cap, ratio, 0.0)


OldLogprobs = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]
"""`(logprobs, behavior_logprobs, recomputed_logprobs, ages)`, all [B, T], to constant log-probs [B, T]."""


def engine(logprobs: Tensor, behavior_logprobs: Tensor, recomputed_logprobs: Tensor | None, ages: Tensor) -> Tensor:
    """log b, as the engine reported it."""
    return behavior_logprobs


def recomputed(logprobs: Tensor, behavior_logprobs: Tensor, recomputed_logprobs: Tensor | None, ages: Tensor) -> Tensor:
    """log p of the weights that the step trains from, computed by the learner before its first minibatch."""
    assert recomputed_logprobs is not None, "the scoring pass sets them for algorithm.old_logprobs=recomputed"
    return recomputed_logprobs


def interpolated(
    logprobs: Tensor, behavior_logprobs: Tensor, recomputed_logprobs: Tensor | None, ages: Tensor
) -> Tensor:
    """log b + a (log p - log b) with a = age / (age + 1): b is `age` versions behind the weights that the step trains
    from, and p, which the step makes, one version before them. No forward pass of its own.

    Source: the proximal log-prob approximation of AReaL (arXiv:2505.24298 describes the system).
    """
    share = ages / (ages + 1.0)
    return behavior_logprobs + share * (logprobs.detach() - behavior_logprobs)


OLD_LOGPROBS: dict[str, OldLogprobs] = {"engine": engine, "recomputed": recomputed, "interpolated": interpolated}


def decoupled(proximal_logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> Tensor:
    """w = p_prox / b, without a bound; the clip of the loss is around p_prox.

    Source: AReaL, arXiv:2505.24298, section 5.2; Batch Size-Invariance for Policy Optimization, arXiv:2110.00641.
    """
    return token_ratio(proximal_logprobs, behavior_logprobs)


CORRECTIONS: dict[str, CorrectionFunction] = {
    "none": none,
    "decoupled": decoupled,
    "tis_token": tis_token,
    "tis_sequence": tis_sequence,
    "icepop": icepop,
    "mis": mis,
}


# Weights of tokens that are older than the staleness bound. One formula a function, one value a token.
#
# Dropping a whole response because its first tokens are old favours short answers, since long answers take longer to
# sample. So each token has an age: old tokens leave the loss, or get an importance weight under the current policy.


def truncated_importance(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, weight_cap: float) -> Tensor:
    """-w A logprobs with the constant w = min(exp(logprobs - old_logprobs), weight_cap): REINFORCE on tokens of another
    policy. A clipped ratio would give old tokens no gradient at all where the two policies differ; here none is lost,
    and the cap bounds the variance.

    Args:
        logprobs: [B, T], of the policy that is trained.
        old_logprobs: [B, T], of the policy that sampled.
        advantages: [B, T], or [B, 1] for one number a response.

    Source: the truncated weights of IMPALA, arXiv:1802.01561, section 4.1; as a loss of tokens: CISPO,
    arXiv:2506.13585.
    """
    ratio = log_ratio(logprobs, old_logprobs).detach().exp()
    return -ratio.clamp(max=weight_cap) * advantages * logprobs


def by_age(loss: Tensor, over_age_loss: Tensor, ages: Tensor, *, max_staleness: int, max_age: int) -> Tensor:
    """`loss` up to an age of `max_staleness`, `over_age_loss` up to `max_age`, 0 beyond; all [B, T].

    Tokens with loss 0 count in the denominators of means: excluding them would raise the weight of other tokens.
    """
    aged = torch.where(ages > max_staleness, over_age_loss, loss)
    return torch.where(ages > max_age, 0.0, aged)
