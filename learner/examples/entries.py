"""Dataset rows and warm-start examples as entries of a ShareFetcher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from mobula.cluster.records.media import MediaHandle
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.runtime.object_store import fetch_or_miss
from mobula.configs.schema import LearnerConfig
from mobula.learner.examples.examples import Example, ExampleOutline, Outlined, Row, fetch_examples
from mobula.learner.gradient_step import shares_of_ranks
from mobula.learner.policies.base import RowOutline

UNKNOWN = ""  # for fields that summaries lack
Parts = Sequence[Sequence[ScoredGroup]]
T = TypeVar("T")
X = TypeVar("X", bound=Outlined)


class _Examples(Generic[X]):
    """Implements `Entries` for examples. `sizes` are the sizes of the parts: each part is one pass and is assigned to
    ranks separately.
    """

    def __init__(self, sizes: Sequence[int], config: LearnerConfig) -> None:
        self._sizes = sizes
        self._config = config

    def __len__(self) -> int:
        return sum(self._sizes)

    @property
    def is_planned(self) -> bool:
        """False: every rank has all references."""
        return False

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

    def __init__(self, parts: Parts, config: LearnerConfig, row: Row, timeout_s: float) -> None:
        super().__init__([len(part) for part in parts], config)
        self._rows = [row for part in parts for row in part]
        self._row = row
        self._timeout_s = timeout_s

    def expected(self) -> list[Example | ExampleOutline]:
        return [_expected(row, index) for index, row in enumerate(self._rows)]

    def fetch(self, indices: Sequence[int]) -> list[Example | ExampleOutline]:
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

    def __init__(self, stored: Sequence[StoredExample], config: LearnerConfig, timeout_s: float) -> None:
        super().__init__([len(stored)], config)
        self._stored = stored
        self._timeout_s = timeout_s

    def expected(self) -> list[Any]:
        return [example.outline for example in self._stored]

    def fetch(self, indices: Sequence[int]) -> list[Any]:
        contents = [self._stored[n].content for n in indices]
        return fetch_or_miss(contents, timeout_s=self._timeout_s, what="examples of the warm start")


def _expected(row: ScoredGroup, index: int) -> ExampleOutline:
    """Predicts an example's size from its summary, to assign the row to a rank."""
    summary = row.summary
    num_targets = max(summary.num_steps)
    media = tuple(MediaHandle(key, UNKNOWN, 0, None) for key in summary.media_keys)
    sequence = RowOutline(num_targets, summary.num_prompt_tokens, summary.num_steps, summary.num_media_tokens, media)
    return ExampleOutline(index, sequence, num_targets, ())
