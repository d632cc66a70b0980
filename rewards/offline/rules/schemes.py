"""A scheme: rules with weights and a threshold, so that a record gets a total and passes or does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mobula.rewards.offline.options import COMPONENTS, ScoreOptions
from mobula.rewards.offline.rules.aerorl_rules import AeroRLRules
from mobula.rewards.offline.rules.answers import Answer
from mobula.rewards.offline.rules.mobula_rules import MobulaRules
from mobula.rewards.offline.sources.records import Record

Scores = tuple[float | None, ...]  # what a scheme makes its components and its total of
TOTAL_DIGITS = 6
# A component below its mark is what the published diagnostics call an issue.
LOW_MARKS: Mapping[str, float] = {"verifier": 0.0, "grounding": 0.0, "format": 0.0, "cost": 0.5}


class Rules(Protocol):
    """Scores a record, or gives a reason why it cannot be scored."""

    name: str
    reads_everything: bool  # metadata beyond the known keys
    may_hang: bool  # then few records are given at a time, in a process that can be ended

    @property
    def num_stuck(self) -> int:
        """Computations that hang in this process; only another one is rid of them."""
        ...

    def prepare(self) -> None:
        """Make ready in this process what scoring takes, a model say."""
        ...

    def score_batch(
        self, records: Sequence[Record], references: Sequence[tuple[str, ...]], answers: Sequence[Answer]
    ) -> Sequence[Scores | str]: ...

    def explain(self, place: int, record: Record, answer: Answer) -> dict[str, Any]:
        """The causes of the scores of the record at `place` of the batch that was scored last, by component."""
        ...


@dataclass(frozen=True)
class Scheme:
    """Rules and how their components become one number."""

    rules: Rules
    components: tuple[str, ...]
    weights: tuple[float, ...]
    pass_threshold: float
    low_marks: Mapping[str, float] = field(default_factory=dict)
    weights_by_label: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Label of a record -> component -> weight, where records of different labels have different components."""

    @property
    def name(self) -> str:
        return self.rules.name

    def named(self, scores: Scores) -> dict[str, float]:
        """The components that ran, by name."""
        return dict(zip(self.components, scores, strict=True))

    def total(self, scores: Scores) -> float:
        """The weighted sum in the order of the components, to six digits, as published."""
        total = 0.0
        for weight, score in zip(self.weights, scores, strict=True):
            total += weight * score
        return round(total, TOTAL_DIGITS)

    def passes(self, result: Scores | str) -> bool:
        """Whether the total reaches the threshold; what is not scored does not."""
        return not isinstance(result, str) and self.total(result) >= self.pass_threshold


def built_in_schemes(options: ScoreOptions) -> tuple[Scheme, Scheme]:
    """aeroRL's published rules, then ours, under the same options."""
    weights = tuple(options.weights[name] for name in COMPONENTS)
    return tuple(
        Scheme(rules(options), COMPONENTS, weights, options.pass_threshold, LOW_MARKS)
        for rules in (AeroRLRules, MobulaRules)
    )
