"""Runs many isolated calls. A call that fails or times out gives a failure for its own request only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mobula.cluster.errors import RewardError
from mobula.rewards.contract import Outcome, ScoringFailure, failure_kind
from mobula.rewards.isolation.process import Isolated


def call_each(
    isolated: Isolated, target: str, calls: Sequence[tuple[Any, ...]], score: Callable[[Any], Any], **kwargs: Any
) -> list[Outcome | Any]:
    """Returns `score` of each call's result, or its `ScoringFailure`, in order; a pool runs the calls concurrently."""
    results = isolated.call_many(target, calls, **kwargs)
    return [failure(result) if isinstance(result, RewardError) else score(result) for result in results]


def failure(error: RewardError) -> ScoringFailure:
    """Converts a `RewardError` to an outcome."""
    return ScoringFailure(failure_kind(error), str(error))
