"""The contract of a reward function: a request in, a finite score out, and a refusal that is never a silent zero."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from numbers import Real
from typing import TYPE_CHECKING, Any

from cluster.errors import RewardError

if TYPE_CHECKING:  # the records pull in the object store, which a reward function's own process never needs
    from cluster.trajectory import Response


@dataclass(frozen=True)
class RewardRequest:
    """What a reward function may look at: the response alone is scored, the rest says what it should have been."""

    response: Response
    references: tuple[str, ...]
    metadata: Mapping[str, Any]
    prompt_text: str


@dataclass(frozen=True)
class Score:
    """One component's value for one response; `reason` is for reports and may be empty."""

    value: float
    reason: str = ""


RewardFunction = Callable[[RewardRequest], float | Score]


class FailureKind(StrEnum):
    """Why something could not be scored. The first three cost a response, the last two cost a worker."""

    FAILED = "failed"
    TIMED_OUT = "timed_out"
    NOT_FINITE = "not_finite"
    WORKER_DIED = "worker_died"
    WORKER_HUNG = "worker_hung"


class TimedOutError(RewardError):
    """A reward function did not answer in its time."""


class NotFiniteError(RewardError):
    """A reward function returned NaN or an infinity."""


def failure_kind(error: RewardError) -> FailureKind:
    """The name under which a refusal is counted."""
    if isinstance(error, TimedOutError):
        return FailureKind.TIMED_OUT
    return FailureKind.NOT_FINITE if isinstance(error, NotFiniteError) else FailureKind.FAILED


def evaluate(function: RewardFunction, request: RewardRequest) -> Score:
    """Call a reward function at the boundary of the run: a finite score, or a `RewardError` that says why not.

    Raises:
        TimedOutError: the function was stopped at its deadline.
        NotFiniteError: it returned NaN or an infinity.
        RewardError: it raised something, or returned no number.
    """
    try:
        result = function(request)
    except RewardError:
        raise
    except Exception as error:  # whatever a reward function raises costs its response, never the run
        raise RewardError(f"raised {type(error).__name__}: {error}") from error
    score = result if isinstance(result, Score) else Score(result)
    if not isinstance(score.value, Real):
        raise RewardError(f"returned {type(score.value).__name__}: return a finite number or a Score")
    value = float(score.value)
    if not math.isfinite(value):
        raise NotFiniteError(f"returned {value}: return a finite number")
    return Score(value, score.reason)
