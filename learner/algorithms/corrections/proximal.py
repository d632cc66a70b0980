"""The old policy that the ratio of a loss is taken to: the engine's, the learner's own, or one between them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

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
