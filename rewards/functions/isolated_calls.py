"""Many isolated calls as outcomes: a call that failed or timed out is its own request's failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cluster.errors import RewardError
from rewards.contract import Failure, Outcome, failure_kind
from rewards.isolated import Isolated


def call_each(
    isolated: Isolated, target: str, calls: Sequence[tuple[Any, ...]], score: Callable[[Any], Any], **kwargs: Any
) -> list[Outcome | Any]:
    """`score` of each call's result, or the `Failure` that it met, in order; the calls go side by side in a pool."""
    results = isolated.call_many(target, calls, **kwargs)
    return [failure(result) if isinstance(result, RewardError) else score(result) for result in results]


def failure(error: RewardError) -> Failure:
    """A refusal as an outcome."""
    return Failure(failure_kind(error), str(error))
