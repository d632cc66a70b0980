"""The contract of a reward function: a request in, a finite score out, and a refusal that is never a silent zero."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from enum import StrEnum
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from mobula.cluster.errors import RewardError, StuckError

if TYPE_CHECKING:  # the records pull in the object store, which a reward function's own process never needs
    from mobula.cluster.records.trajectory import Response


# At the start of a line or behind a special token: a question may end in the name of a tag as well.
_OPENED_BY_PROMPT = re.compile(r"(?:^|(?<=[\n>|\]\uff5c]))(<([A-Za-z][\w-]*)>(?:\s*|\s+</think>\s*))\Z")


@dataclass(frozen=True)
class RewardRequest:
    """Input of a reward function: the response is scored, the other fields describe the prompt and the expected answer.

    Pictures, the prompt's in `prompt_pictures` and generated ones in `response.pictures`, are whole encoded files.
    """

    response: Response
    references: tuple[str, ...]
    metadata: Mapping[str, Any]
    prompt_text: str
    prompt_pictures: tuple[bytes, ...] = field(default=(), repr=False)

    def text_with(self, tags: Collection[str]) -> str:
        """The response, behind the tag that its prompt opens for it if that is one of `tags`: `<think>` of a reasoning
        model, or the empty thought with which a prompt turns reasoning off.
        """
        opened = _OPENED_BY_PROMPT.search(self.prompt_text)
        return f"{opened[1]}{self.response.text}" if opened and opened[2] in tags else self.response.text


@dataclass(frozen=True)
class Score:
    """One component's value for one response.

    `breakdown` holds the finite parts that made the value, by name; `reason` is for reports and may be empty.
    """

    value: float
    reason: str = ""
    breakdown: Mapping[str, float] = field(default_factory=dict)


RewardFunction = Callable[[RewardRequest], float | Score]

MAX_VALUE = 1e18  # float32 holds the squares, of which the statistics of groups are made
SCORE, REASON = "score", "reason"  # keys of a mapping that stands for a Score; its other keys are the breakdown
RETURN = "return a finite number, a mapping with 'score', or a Score"


class FailureKind(StrEnum):
    """Why something could not be scored. The first three cost a response, the next two a worker, the last one time."""

    FAILED = "failed"
    TIMED_OUT = "timed_out"
    NOT_FINITE = "not_finite"
    WORKER_DIED = "worker_died"
    WORKER_HUNG = "worker_hung"
    REPLY_LOST = "reply_lost"


@dataclass(frozen=True)
class ScoringFailure:
    """Why one component could not score one response: never a number."""

    kind: FailureKind
    reason: str


Outcome = Score | ScoringFailure


@runtime_checkable
class BatchRewardFunction(Protocol):
    """A reward function that is cheaper for many responses at once: a model, a server, a process that was sent for."""

    def score_batch(self, requests: Sequence[RewardRequest]) -> Sequence[float | Outcome]:
        """One outcome a request, in order; a response that cannot be scored costs no other one its score."""
        ...


class TimedOutError(RewardError):
    """A reward function did not answer in its time."""


class NotFiniteError(RewardError):
    """A reward function returned NaN, an infinity, or a number above `MAX_VALUE`."""


def failure_kind(error: RewardError) -> FailureKind:
    """The name under which a refusal is counted."""
    if isinstance(error, TimedOutError):
        return FailureKind.TIMED_OUT
    return FailureKind.NOT_FINITE if isinstance(error, NotFiniteError) else FailureKind.FAILED


def evaluate(function: RewardFunction, request: RewardRequest) -> Score:
    """Call a reward function at the boundary of the run: a finite score, or a `RewardError` with the reason.

    Raises:
        TimedOutError: the function was stopped at its deadline.
        NotFiniteError: it returned NaN or an infinity.
        RewardError: it raised something, or returned no number.
    """
    try:
        return checked(function(request))
    except RewardError:
        raise
    except Exception as error:  # whatever a reward function raises costs its response, never the run
        raise RewardError(f"raised {type(error).__name__}: {error}") from error


def evaluate_batch(
    function: RewardFunction | BatchRewardFunction, requests: Sequence[RewardRequest]
) -> tuple[Outcome, ...]:
    """One outcome a request, in order, whatever the function does.

    Raises:
        StuckError: this process cannot go on, so that nothing is known of the responses.
    """
    if not hasattr(function, "score_batch"):  # what the protocol's own check asks, at a twentieth of its price
        return tuple(_outcome(evaluate, function, request) for request in requests)
    try:
        results = function.score_batch(requests)
        if len(results) != len(requests):
            raise RewardError(f"returned {len(results)} outcomes for {len(requests)} requests")
    except StuckError:
        raise
    except RewardError as error:
        return (ScoringFailure(failure_kind(error), str(error)),) * len(requests)
    except Exception as error:  # as in `evaluate`
        return (ScoringFailure(FailureKind.FAILED, f"raised {type(error).__name__}: {error}"),) * len(requests)
    return tuple(result if isinstance(result, ScoringFailure) else _outcome(checked, result) for result in results)


def portable(result: Any) -> Any:
    """The result of a function with Python numbers in the place of scalars of array libraries (numpy, torch), so that
    a process without the library reads it.

    Raises:
        TypeError: it is an array of several numbers.
    """
    if isinstance(result, Score):
        breakdown = portable(result.breakdown)
        return Score(_python_number(result.value), result.reason, breakdown)
    if isinstance(result, Mapping):
        return {name: _python_number(part) for name, part in result.items()}
    return _python_number(result)


def checked(result: Any) -> Score:
    """The result of a reward function as a finite score. Any number is one: bool, int, float, Fraction, Decimal, a
    scalar of numpy or torch. A mapping has `score`, may have `reason`, and its other keys are the breakdown.

    Raises:
        NotFiniteError: it, or a part of it, is NaN, an infinity, or too large.
        RewardError: it is no number.
    """
    if type(result) is float and abs(result) <= MAX_VALUE:
        return Score(result)
    score = result if isinstance(result, Score) else _as_score(result)
    is_plain = type(score.value) is float and type(score.reason) is str and score.breakdown == {}
    if is_plain and abs(score.value) <= MAX_VALUE:
        return score  # as nearly all are: what follows takes longer than a cheap rule
    named = isinstance(score.breakdown, Mapping) and all(isinstance(name, str) for name in score.breakdown)
    if not named or not isinstance(score.reason, str):
        given = f"reason={score.reason!r} and breakdown={score.breakdown!r}"
        raise RewardError(f"returned a Score with {given[:200]}: give a text, and numbers by name")
    value, parts = _finite(score.value, ""), {n: _finite(p, f" as {n!r}") for n, p in score.breakdown.items()}
    return Score(value, score.reason, parts)


def _as_score(result: Any) -> Score:
    if not isinstance(result, Mapping):
        return Score(result)
    if SCORE not in result:
        raise RewardError(f"returned a mapping with {', '.join(map(repr, result)) or 'nothing'}: {RETURN}")
    parts = {name: part for name, part in result.items() if name not in (SCORE, REASON)}
    return Score(result[SCORE], result.get(REASON, ""), parts)


def _finite(number: Any, where: str) -> float:
    try:
        number = _python_number(number)
    except TypeError as error:
        raise RewardError(f"{error}{where}: {RETURN}") from error
    if number is None:
        raise RewardError(f"returned None{where}, as a function without `return` does: {RETURN}")
    if not isinstance(number, Real | Decimal):
        raise RewardError(f"returned {type(number).__name__}{where}: {RETURN}")
    try:
        value = float(number)
    except (OverflowError, ValueError) as error:  # ValueError: a signalling NaN of decimal
        raise NotFiniteError(f"returned a number that no float holds{where}: return a finite one") from error
    if not math.isfinite(value):
        raise NotFiniteError(f"returned {value}{where}: return a finite number")
    if abs(value) > MAX_VALUE:
        raise NotFiniteError(f"returned {value:g}{where}: return a number of at most {MAX_VALUE:g}, or its logarithm")
    return value


def _python_number(number: Any) -> Any:
    """A scalar of an array library (`item()` of numpy, torch, jax) as a Python number; anything else as it is.

    Raises:
        TypeError: an array of several numbers.
    """
    if isinstance(number, bool | int | float) or not callable(item := getattr(number, "item", None)):
        return number
    try:
        return item()
    except (ValueError, RuntimeError, TypeError) as error:
        shape = tuple(getattr(number, "shape", ()))
        raise TypeError(f"returned {type(number).__name__} of shape {shape}, not one number") from error


def _outcome(score: Callable[..., Score], *given: Any) -> Outcome:
    try:
        return score(*given)
    except RewardError as error:
        return ScoringFailure(failure_kind(error), str(error))
    except Exception as error:  # a result can be of any type, and raise whatever it likes when it is looked at
        return ScoringFailure(FailureKind.FAILED, f"returned what raises {type(error).__name__}: {error}")
