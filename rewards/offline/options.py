"""The options of a scoring: weights, format, budgets, threshold, and how much of it is shown."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

COMPONENTS = ("verifier", "grounding", "format", "cost")
DEFAULT_WEIGHTS: Mapping[str, float] = {"verifier": 0.4, "grounding": 0.3, "format": 0.2, "cost": 0.1}
WORST_SCORE, BEST_SCORE = -1.0, 1.0
NO_JSON_PENALTY, NO_MATCH_PENALTY = 1.3, 0.5


@dataclass(frozen=True)
class ScoreOptions:
    """The options of both readings of the rules, aeroRL's and ours."""

    weights: Mapping[str, float]
    require_json: bool
    regex_pattern: str  # empty: any response has the right shape
    target_tokens: int
    latency_budget_ms: float
    pass_threshold: float
    top_k: int  # best and worst records that are shown, each
    max_ids: int  # records of a kind that are named; all are counted

    def __post_init__(self) -> None:
        """Refuses what would give a number without a meaning.

        Raises:
            ValueError: the pattern is no regular expression, a weight has no component, a count is negative, a number
                is not finite.
        """
        unknown = set(self.weights) ^ set(COMPONENTS)
        if unknown:
            raise ValueError(f"weights of {', '.join(sorted(unknown))}: there are {', '.join(COMPONENTS)}")
        try:
            re.compile(self.regex_pattern)
        except re.error as error:
            raise ValueError(f"regex_pattern={self.regex_pattern!r} is no regular expression: {error}") from error
        for name in ("latency_budget_ms", "pass_threshold"):
            if not math.isfinite(value := getattr(self, name)):
                raise ValueError(f"{name}={value}: give a finite number")
        if self.top_k < 0 or self.max_ids < 0:
            raise ValueError(f"top_k={self.top_k} and max_ids={self.max_ids}: neither may be negative")


def parse_weights(words: Sequence[str]) -> dict[str, float]:
    """The default weights with those of `name=value` words in their place.

    Raises:
        ValueError: a word is no pair, names no component, or its value is no finite number.
    """
    weights = dict(DEFAULT_WEIGHTS)
    for word in words:
        name, _, value = word.partition("=")
        if name not in weights:
            raise ValueError(f"--weight {word}: there is no component {name!r}, give one of {', '.join(COMPONENTS)}")
        try:
            weights[name] = float(value)
        except ValueError as error:
            raise ValueError(f"--weight {word}: {value!r} is no number, write {name}=0.5") from error
        if not abs(weights[name]) < float("inf"):
            raise ValueError(f"--weight {word}: give a finite number")
    return weights


def format_scores(options: ScoreOptions) -> dict[tuple[bool, bool], float]:
    """The format component by whether the response is JSON (as the reading means it), and the pattern was found."""
    found = {}
    for is_json in (True, False):
        for is_matched in (True, False):
            score = 1.0
            if options.require_json and not is_json:
                score -= NO_JSON_PENALTY
            if not is_matched:
                score -= NO_MATCH_PENALTY
            found[is_json, is_matched] = clipped(score)
    return found


def clipped(score: float) -> float:
    """The score within [-1, 1]."""
    return max(WORST_SCORE, min(BEST_SCORE, score))
