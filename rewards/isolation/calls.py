"""Many isolated calls as outcomes: a call that failed or timed out is its own request's failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mobula.cluster.errors import RewardError
from mobula.rewards.contract import Outcome, ScoringFailure, failure_kind
from mobula.rewards.isolation.process import Isolated


def call_each(
    isolated: Isolated, target: str, calls: Sequence[tuple[Any, ...]], score: Callable[[Any], Any], **kwargs: Any
) -> list[Outcome | Any]:
    """`score` of each call's result, or the `ScoringFailure` that it met, in order; the calls go side by side in a
    pool."""
    results = isolated.call_many(target, calls, **kwargs)
    return [failure(result) if isinstance(result, RewardError) else score(result) for result in results]


def failure(error: RewardError) -> ScoringFailure:
    """A refusal as an outcome."""
    return ScoringFailure(failure_kind(error), str(error))
