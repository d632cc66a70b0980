"""Partial results of scored records of a part of a file; parts are merged in their order."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from mobula.rewards.offline.rules.schemes import Scheme
from mobula.rewards.offline.sources.records import MAX_NAMED_LINES
from mobula.rewards.offline.tally import Disagreement, Tally


@dataclass(frozen=True)
class ScoredRecord:
    """One record as a report shows it. `record` counts the file's whole records from 1."""

    record: int
    id: str | int | None
    prompt: str
    response: str
    references: tuple[str, ...]
    scores: dict[str, dict[str, float] | str]  # scheme -> its components, or why there are none
    totals: dict[str, float | None]  # scheme -> the weighted sum
    details: dict[str, dict[str, Any]]  # scheme -> component -> what made its score


@dataclass
class SchemeResults:
    """One scheme's results; the best first, the worst last."""

    tally: Tally
    best: list[ScoredRecord] = field(default_factory=list)
    worst: list[ScoredRecord] = field(default_factory=list)
    false_pass_ids: list[str] = field(default_factory=list)  # sorted

    def merge(self, other: SchemeResults, name: str, top_k: int, max_ids: int) -> None:
        """Add what comes later in the file; of equal totals the earlier one is the better one."""
        self.tally.merge(other.tally)
        self.best = sorted([*self.best, *other.best], key=lambda example: -example.totals[name])[:top_k]
        worst = sorted([*self.worst, *other.worst], key=lambda example: (-example.totals[name], example.record))
        self.worst = worst[max(0, len(worst) - top_k) :]
        self.false_pass_ids = sorted([*self.false_pass_ids, *other.false_pass_ids])[:max_ids]


@dataclass
class Partial:
    """All results of a stretch. `disagreeing` holds the first records by component in which two schemes differ."""

    schemes: list[SchemeResults]
    disagreement: Disagreement = field(default_factory=Disagreement)
    disagreeing: dict[str, list[ScoredRecord]] = field(default_factory=dict)
    num_records: int = 0
    num_manual_passes: int = 0
    num_lines: int = 0
    num_broken: int = 0
    broken: list[tuple[int, str]] = field(default_factory=list)  # line, what is wrong; the first ones
    rows: bytes = b""  # each record's results as a line of JSON, where they are asked for; never merged

    @classmethod
    def of(cls, schemes: tuple[Scheme, ...]) -> Partial:
        """An empty one."""
        return cls([SchemeResults(Tally.of(scheme)) for scheme in schemes])

    def merge(self, other: Partial, schemes: tuple[Scheme, ...], top_k: int, max_ids: int) -> None:
        """Add the stretch that follows this one."""
        other._move(self.num_records, self.num_lines)
        for scheme, ours, theirs in zip(schemes, self.schemes, other.schemes, strict=True):
            ours.merge(theirs, scheme.name, top_k, max_ids)
        self.disagreement.merge(other.disagreement)
        for name, examples in other.disagreeing.items():
            self.disagreeing[name] = [*self.disagreeing.get(name, ()), *examples][:top_k]
        self.num_records += other.num_records
        self.num_manual_passes += other.num_manual_passes
        self.num_lines += other.num_lines
        self.num_broken += other.num_broken
        self.broken = [*self.broken, *other.broken][:MAX_NAMED_LINES]

    def _move(self, num_records: int, num_lines: int) -> None:
        """Count records and lines from where this stretch begins in the file."""

        def moved(examples: list[ScoredRecord]) -> list[ScoredRecord]:
            return [replace(example, record=example.record + num_records) for example in examples]

        for results in self.schemes:
            results.best, results.worst = moved(results.best), moved(results.worst)
        self.disagreeing = {name: moved(examples) for name, examples in self.disagreeing.items()}
        self.broken = [(line + num_lines, reason) for line, reason in self.broken]
