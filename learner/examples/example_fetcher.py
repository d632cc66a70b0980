"""ExampleFetcher: a rank's way from references to rows of a data set to the examples that it trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from cluster.errors import LostObjectError
from cluster.records.media import MediaHandle
from cluster.records.trajectory import ScoredGroup
from configs.schema import RunConfig
from learner.examples.examples import Example, ExampleOutline, Row, SharedExample, fetch_examples
from learner.gradient_step import shares_of_ranks
from learner.policies.base import RowOutline
from learner.shares import Exchange

UNKNOWN = ""  # what a summary has no room for
Parts = Sequence[Sequence[ScoredGroup]]
R = TypeVar("R", Example, ExampleOutline, SharedExample)


@dataclass(frozen=True)
class ExampleReport:
    """Sent to all ranks: outlines of the rows that this rank has fetched, by their place, or why it could not."""

    outlines: Mapping[int, ExampleOutline] = field(default_factory=dict)
    lost: str = ""


class ExampleFetcher:
    """Fetches the rows that this rank takes through the model, and gets outlines of the others.

    As `learner.shares.StepFetcher` does for groups: rows are first shared out by the sizes in their summaries, outlines
    with exact sizes are exchanged, and what the summaries missed is fetched. Every rank comes to the same shares, so
    the numbers are those of all rows on every rank.

    Example:
        [examples] = ExampleFetcher(config, rank, world_size, all_ranks, answer_row).fetch([rows])
    """

    def __init__(self, config: RunConfig, rank: int, world_size: int, exchange: Exchange, row: Row) -> None:
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._exchange = exchange
        self._row = row

    def fetch(self, parts: Parts) -> list[list[SharedExample]]:
        """The examples of each part, in order; a part is what one pass takes, shared out by itself. Collective.

        Raises:
            LostObjectError: on every rank, if one of them could not fetch a row.
        """
        rows = [row for part in parts for row in part]
        if self._world_size == 1:
            return _like(parts, [*self._examples(rows)])
        held = self._wanted(_like(parts, [_planned(row, n) for n, row in enumerate(rows)]))
        for n in set(range(len(rows))).difference(*held):
            held[n % self._world_size].add(n)
        whole, lost = self._fetched(rows, held[self._rank])
        outlines = self._exchanged(whole, lost)
        exact = self._wanted(_like(parts, [outlines[n] for n in range(len(rows))]))
        missing = [wanted - had for wanted, had in zip(exact, held, strict=True)]
        if any(missing):
            more, lost = self._fetched(rows, missing[self._rank])
            self._exchanged({}, lost)
            whole |= more
        return _like(parts, [whole[n] if n in whole else outlines[n] for n in range(len(rows))])

    def _wanted(self, parts: Sequence[Sequence[ExampleOutline]]) -> list[set[int]]:
        """For each rank the places of the rows that it takes, those that only keep step with other ranks included."""
        wanted: list[set[int]] = [set() for _ in range(self._world_size)]
        for part in filter(None, parts):
            for own, shares in zip(wanted, shares_of_ranks(part, self._config.learner, self._world_size), strict=True):
                own.update(outline.index for share in shares for outline in share)
        return wanted

    def _fetched(self, rows: Sequence[ScoredGroup], places: set[int]) -> tuple[dict[int, Example], str]:
        """The examples at some places, or why there are none."""
        try:
            found = self._examples([rows[n] for n in sorted(places)])
        except LostObjectError as error:
            return {}, str(error)
        return dict(zip(sorted(places), found, strict=True)), ""

    def _examples(self, rows: Sequence[ScoredGroup]) -> list[Example]:
        return fetch_examples(rows, self._row, self._config.timeouts.object_s)

    def _exchanged(self, whole: Mapping[int, Example], lost: str) -> dict[int, ExampleOutline]:
        outlines = {n: ExampleOutline.of(example, n) for n, example in whole.items()}
        reports: Sequence[ExampleReport] = self._exchange(ExampleReport(outlines, lost))
        losses = {f"learner/{rank}: {report.lost}" for rank, report in enumerate(reports) if report.lost}
        if losses:
            raise LostObjectError("; ".join(sorted(losses)))
        return {n: outline for report in reports for n, outline in report.outlines.items()}


def _like(parts: Parts, rows: Sequence[R]) -> list[list[R]]:
    """Rows that follow each other, in parts as long as these."""
    remaining = iter(rows)
    return [[next(remaining) for _ in part] for part in parts]


def _planned(row: ScoredGroup, index: int) -> ExampleOutline:
    """What a summary lets expect, good enough to guess who takes the row."""
    summary = row.summary
    num_targets = max(summary.num_steps)
    num_tokens = summary.num_trajectories * (summary.num_prompt_tokens + num_targets)
    media = tuple(MediaHandle(key, UNKNOWN, 0, None) for key in summary.media_keys)
    return ExampleOutline(index, RowOutline(num_targets, num_tokens, summary.num_media_tokens, media), num_targets, ())
