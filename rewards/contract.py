"""The contract of a reward function: it returns a finite score for a request, or fails, which is never scored as 0."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from enum import StrEnum
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from mobula.cluster.errors import RewardError, StuckError

if TYPE_CHECKING:  # the records pull in the object store, which a reward function's own process never needs
    from mobula.cluster.records.trajectory import Response


T = TypeVar("T")

# At the start of a line or after a special token: a question may also end with the name of a tag.
_OPENED_BY_PROMPT = re.compile(r"(?:^|(?<=[\n>|\]\uff5c]))(<([A-Za-z][\w-]*)>(?:\s*|\s+</think>\s*))\Z")


@dataclass(frozen=True)
class RewardRequest:
    """Input of a reward function: the response to score, with its prompt and the expected answer. `prompt_images`
    (images of the prompt) and `response.images` (generated images) are encoded files."""

    response: Response
    references: tuple[str, ...]
    metadata: Mapping[str, Any]
    prompt_text: str
    prompt_images: tuple[bytes, ...] = field(default=(), repr=False)

    def text_with(self, tags: Collection[str]) -> str:
        """Returns the response, with the tag that its prompt has opened prepended if it is in `tags`: `<think>` of a
        reasoning model, or the empty thought with which a prompt turns reasoning off."""
        opened = _OPENED_BY_PROMPT.search(self.prompt_text)
        return f"{opened[1]}{self.response.text}" if opened and opened[2] in tags else self.response.text


@dataclass(frozen=True)
class Score:
    """One component's value for one response. `breakdown` holds the finite parts of the value by name; `reason` is for
    reports and may be empty."""

    value: float
    reason: str = ""
    breakdown: Mapping[str, float] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:  # faster than by the names of its fields
        return Score, (self.value, self.reason, dict(self.breakdown))


RewardFunction = Callable[[RewardRequest], float | Score]

MAX_VALUE = 1e18  # so that its square, for the statistics of groups, is finite in float32
SCORE, REASON = "score", "reason"  # keys of a mapping in place of a Score; other keys are the breakdown
RETURN = "return a finite number, a mapping with 'score', or a Score"


class FailureKind(StrEnum):
    """Why scoring failed. The first three concern a response, the next two a worker, the last one a lost reply."""

    FAILED = "failed"
    TIMED_OUT = "timed_out"
    NOT_FINITE = "not_finite"
    WORKER_DIED = "worker_died"
    WORKER_HUNG = "worker_hung"
    REPLY_LOST = "reply_lost"


@dataclass(frozen=True)
class ScoringFailure:
    """Why one component could not score one response; it is never replaced by a number."""

    kind: FailureKind
    reason: str


Outcome = Score | ScoringFailure


@runtime_checkable
class BatchRewardFunction(Protocol):
    """A reward function that scores batches: a model, a server or a separate process."""

    def score_batch(self, requests: Sequence[RewardRequest]) -> Sequence[float | Outcome]:
        """Returns one outcome per request, in order. A response that cannot be scored does not affect the others."""


class TimedOutError(RewardError):
    """A reward function did not answer before its deadline."""


class NotFiniteError(RewardError):
    """A reward function returned NaN, an infinity, or a number above `MAX_VALUE`."""


def failure(error: RewardError) -> ScoringFailure:
    kinds = {TimedOutError: FailureKind.TIMED_OUT, NotFiniteError: FailureKind.NOT_FINITE}
    kind = next((kind for error_class, kind in kinds.items() if isinstance(error, error_class)), FailureKind.FAILED)
    return ScoringFailure(kind, str(error))


def score_prepared(
    requests: Sequence[RewardRequest],
    prepare: Callable[[RewardRequest], T],
    score: Callable[[Sequence[T]], Sequence[float | Outcome]],
) -> list[float | Outcome]:
    """Returns one outcome per request, in order: from `score` for the requests that `prepare` accepts, else its
    `RewardError` as a failure. Without an accepted request `score` is not called."""
    outcomes: dict[int, float | Outcome] = {}
    prepared: dict[int, T] = {}
    for index, request in enumerate(requests):
        try:
            prepared[index] = prepare(request)
        except RewardError as error:
            outcomes[index] = failure(error)
    if prepared:
        outcomes.update(zip(prepared, score(list(prepared.values())), strict=True))
    return [outcomes[index] for index in range(len(requests))]


def evaluate(function: RewardFunction, request: RewardRequest) -> Score:
    """Calls a reward function and returns its finite score.

    Raises:
        TimedOutError: the function was stopped at its deadline.
        NotFiniteError: the function returned NaN or an infinity.
        RewardError: the function raised an error, or returned no number.
    """
    try:
        return checked(function(request))
    except RewardError:
        raise
    except Exception as error:  # any error of a reward function fails its response, never the run
        raise RewardError(f"raised {type(error).__name__}: {error}") from error


def evaluate_batch(
    function: RewardFunction | BatchRewardFunction, requests: Sequence[RewardRequest]
) -> tuple[Outcome, ...]:
    """Returns one outcome per request, in order, for any behaviour of the function. Raises: StuckError: this process
    cannot continue, so the responses have no outcome."""
    if not hasattr(function, "score_batch"):  # like isinstance() with the protocol, but twenty times faster
        return tuple(_outcome(evaluate, function, request) for request in requests)
    try:
        results = function.score_batch(requests)
        if len(results) != len(requests):
            raise RewardError(f"returned {len(results)} outcomes for {len(requests)} requests")
    except StuckError:
        raise
    except RewardError as error:
        return (failure(error),) * len(requests)
    except Exception as error:  # as in `evaluate`
        return (ScoringFailure(FailureKind.FAILED, f"raised {type(error).__name__}: {error}"),) * len(requests)
    return tuple(result if isinstance(result, ScoringFailure) else _outcome(checked, result) for result in results)


def portable(result: Any) -> Any:
    """Replaces scalars of array libraries (numpy, torch) in a result by Python numbers, so that a process without the
    library can unpickle it. Raises: TypeError: the result is an array of several numbers."""
    if isinstance(result, Score):
        breakdown = portable(result.breakdown)
        return Score(_python_number(result.value), result.reason, breakdown)
    if isinstance(result, Mapping):
        return {name: _python_number(part) for name, part in result.items()}
    return _python_number(result)


def checked(result: Any) -> Score:
    """Converts the result of a reward function to a finite score. It may be any number (bool, int, float, Fraction,
    Decimal, a scalar of numpy or torch) or a mapping with `score`, optionally `reason`, and the breakdown. Raises:
    NotFiniteError: a number is NaN, an infinity, or too large. RewardError: the result is no number."""
    if type(result) is float and abs(result) <= MAX_VALUE:
        return Score(result)
    score = result if isinstance(result, Score) else _as_score(result)
    is_plain = type(score.value) is float and type(score.reason) is str and score.breakdown == {}
    if is_plain and abs(score.value) <= MAX_VALUE:
        return score  # the usual case; the checks below take longer than a cheap reward function
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
    """Converts a scalar of an array library (`item()` of numpy, torch, jax). Raises: TypeError: it is an array."""
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
        return failure(error)
    except Exception as error:  # a result may be of any type, and its methods may raise anything
        return ScoringFailure(FailureKind.FAILED, f"returned what raises {type(error).__name__}: {error}")
