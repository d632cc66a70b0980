"""Scores requests with a model in batches; requests that cannot be encoded fail one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from mobula.cluster.errors import RewardError
from mobula.rewards.contract import FailureKind, Outcome, RewardRequest, ScoringFailure, TimedOutError, failure_kind
from mobula.rewards.isolation.deadline import InTime

T = TypeVar("T")


def score_in_batches(
    requests: Sequence[RewardRequest],
    *,
    encode: Callable[[RewardRequest], T],
    size: Callable[[T], int],
    score: Callable[[Sequence[T]], Sequence[Outcome | float]],
    batch_size: int,
    in_time: InTime,
) -> list[Outcome | float]:
    """Returns one outcome per request, in order. A request that `encode` refuses does not affect the others.

    A batch that raises, for example out of memory, or times out, fails alone. Batches have requests of similar `size`
    to minimise padding, the largest first, so that a lack of memory shows at once.
    """
    outcomes: dict[int, Outcome | float] = {}
    encoded: dict[int, T] = {}
    for index, request in enumerate(requests):
        try:
            encoded[index] = encode(request)
        except RewardError as error:
            outcomes[index] = ScoringFailure(failure_kind(error), str(error))
    order = sorted(encoded, key=lambda index: size(encoded[index]), reverse=True)
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        outcomes.update(zip(batch, _scored(score, [encoded[index] for index in batch], in_time), strict=True))
    return [outcomes[index] for index in range(len(requests))]


def _scored(
    score: Callable[[Sequence[T]], Sequence[Outcome | float]], batch: Sequence[T], in_time: InTime
) -> Sequence[Outcome | float]:
    def compute() -> Sequence[Outcome | float]:
        with torch.inference_mode():
            return score(batch)

    try:
        return in_time.call(compute, f"a batch of {len(batch)}", len(batch))
    except TimedOutError as error:
        return (ScoringFailure(FailureKind.TIMED_OUT, str(error)),) * len(batch)
    except Exception as error:  # any error of a model fails its batch only
        reason = f"a batch of {len(batch)} raised {type(error).__name__}: {error}"
        return (ScoringFailure(FailureKind.FAILED, reason),) * len(batch)
