"""Dataset rows and warm-start examples as entries of a ShareFetcher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from mobula.cluster.records.media import MediaHandle
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.runtime.object_store import fetch_or_miss
from mobula.configs.schema import LearnerConfig, RunConfig
from mobula.learner.examples.examples import Example, ExampleOutline, Outlined, Row, end_row, fetch_examples
from mobula.learner.gradient_step import shares_of_ranks
from mobula.learner.policies.base import RowOutline
from mobula.learner.shares.portions import ELSEWHERE, GROUPS, Planner, Portion, with_portion
from mobula.learner.shares.share_fetcher import planned_shares

UNKNOWN = ""  # for fields that summaries lack
Parts = Sequence[Sequence[ScoredGroup]]
T = TypeVar("T")
X = TypeVar("X", bound=Outlined)


class _Examples(Generic[X]):
    """Implements `Entries` for examples. `sizes` are the sizes of the parts: each part is one pass and is assigned to
    ranks separately. `portion` has the references of this rank, if the examples have none.
    """

    kind = GROUPS

    def __init__(self, sizes: Sequence[int], config: LearnerConfig, portion: Portion | None = None) -> None:
        self._sizes = sizes
        self._config = config
        self.is_planned = portion is not None and not portion.is_final

    def __len__(self) -> int:
        return sum(self._sizes)

    def in_parts(self, examples: Sequence[T]) -> list[list[T]]:
        """Splits the examples into parts."""
        remaining = iter(examples)
        return [[next(remaining) for _ in range(size)] for size in self._sizes]

    def wanted(self, entries: Sequence[X | ExampleOutline], num_ranks: int) -> list[set[int]]:
        """For each rank, the indices of its examples, including padding rows."""
        wanted: list[set[int]] = [set() for _ in range(num_ranks)]
        for part in filter(None, self.in_parts([ExampleOutline.of(entry, n) for n, entry in enumerate(entries)])):
            for own, shares in zip(wanted, shares_of_ranks(part, self._config, num_ranks), strict=True):
                own.update(outline.index for share in shares for outline in share)
        return wanted

    def outline(self, entry: X | ExampleOutline, index: int) -> ExampleOutline:
        return ExampleOutline.of(entry, index)

    def restored(self, outline: ExampleOutline) -> X | ExampleOutline:
        return outline


class DataRows(_Examples[Example]):
    """Implements `mobula.learner.shares.share_fetcher.Entries` for dataset rows.

    Example:
        rows = DataRows([first, second], config.learner, answer_row, timeout_s=60)
        first, second = rows.in_parts(shares.fetch(rows))
    """

    def __init__(
        self,
        parts: Parts,
        config: LearnerConfig,
        row: Row,
        timeout_s: float,
        portion: Portion | None = None,
        kind: str = GROUPS,
    ) -> None:
        super().__init__([len(part) for part in parts], config, portion)
        self.kind = kind
        self._rows = with_portion([row for part in parts for row in part], portion)
        self._row = row
        self._timeout_s = timeout_s

    def expected(self) -> list[Example | ExampleOutline]:
        return [_expected(row, index, self._row) for index, row in enumerate(self._rows)]

    def fetch(self, indices: Sequence[int]) -> list[Example | ExampleOutline]:
        assert all(self._rows[n].group is not ELSEWHERE for n in indices), "rows without references on this rank"
        return [*fetch_examples([self._rows[n] for n in indices], self._row, self._timeout_s)]


@dataclass(frozen=True)
class StoredExample:
    """A warm-start example in the object store."""

    outline: ExampleOutline
    content: Any  # the example, or a reference to it


def stored_examples(examples: Sequence[Outlined], put: Callable[[Any], Any]) -> list[StoredExample]:
    """Stores the examples of one pass; `put` returns a reference that `cluster.runtime.object_store.fetch` resolves."""
    return [StoredExample(ExampleOutline.of(example, n), put(example)) for n, example in enumerate(examples)]


class TaughtExamples(_Examples[Any]):
    """Implements `learner.shares.share_fetcher.Entries` for warm-start examples, which have exact sizes."""

    def __init__(
        self, stored: Sequence[StoredExample], config: LearnerConfig, timeout_s: float, portion: Portion | None = None
    ) -> None:
        super().__init__([len(stored)], config, portion)
        references = {} if portion is None else portion.references
        self._stored = [
            replace(one, content=references[n][0]) if n in references else one for n, one in enumerate(stored)
        ]
        self._timeout_s = timeout_s

    def expected(self) -> list[Any]:
        return [example.outline for example in self._stored]

    def fetch(self, indices: Sequence[int]) -> list[Any]:
        contents = [self._stored[n].content for n in indices]
        assert all(content is not ELSEWHERE for content in contents), "examples without references on this rank"
        return fetch_or_miss(contents, timeout_s=self._timeout_s, what="examples of the warm start")


def rows_planner(config: RunConfig, row: Row, part_size: int | None = None) -> Planner:
    """Returns the planner of dataset rows: each rank fetches first what the summaries assign to it.

    Args:
        part_size: rows of each pass; None: all rows are one pass.
    """

    def planned(groups: Sequence[ScoredGroup], version: int, num_ranks: int) -> list[set[int]]:
        entries = DataRows(parts_of(groups, part_size or len(groups)), config.learner, row, config.timeouts.object_s)
        held, _ = planned_shares(entries, entries.expected(), num_ranks)
        return held

    return planned


def parts_of(rows: Sequence[ScoredGroup], size: int) -> list[Sequence[ScoredGroup]]:
    """Cuts rows into parts of `size`."""
    return [rows[n : n + size] for n in range(0, len(rows), size)]


def portions_of_examples(
    stored: Sequence[StoredExample], num_ranks: int, *, config: LearnerConfig
) -> tuple[list[StoredExample], list[Portion]]:
    """Returns the examples without references, and the references of each rank, which follow from exact sizes."""
    entries = TaughtExamples(stored, config, timeout_s=0.0)
    held, _ = planned_shares(entries, entries.expected(), num_ranks)
    portions = [Portion({n: (stored[n].content, None) for n in sorted(own)}, is_final=True) for own in held]
    return [replace(one, content=ELSEWHERE) for one in stored], portions


def _expected(row: ScoredGroup, index: int, row_of: Row) -> ExampleOutline:
    """Predicts an example's size from its summary, to assign the row to a rank. It is exact, but for the key of the
    prompt and for images.
    """
    summary = row.summary
    num_targets = max(summary.num_steps)
    media = tuple(MediaHandle(key, UNKNOWN, 0, None) for key in summary.media_keys)
    sequence = RowOutline(num_targets, summary.num_prompt_tokens, summary.num_steps, summary.num_media_tokens, media)
    sequence = sequence.with_end() if row_of is end_row else sequence
    return ExampleOutline(index, sequence, num_targets, ())
