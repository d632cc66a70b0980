"""Prompts in a reproducible, endless order: what is trained on, what is evaluated, and a check of both beforehand."""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from mobula.actors.datasets.lazy_rows import LazyRows, endless
from mobula.actors.datasets.rows import AnyRow, R, R_co, RowError, Skipped, Split, count_by_reason, first_few
from mobula.cluster.errors import DatasetError, SkippedSample

logger = logging.getLogger(__name__)


P = TypeVar("P")  # a `Prompt`, or the `ScoredGroup` that an offline job makes of a row
P_co = TypeVar("P_co", covariant=True)
R_contra = TypeVar("R_contra", bound=AnyRow, contravariant=True)


class PromptMaker(Protocol[R_contra, P_co]):
    """Turns rows into prompts (`mobula.actors.processors.chat.ChatProcessor`)."""

    def prepare(self, row: R_contra, prompt_id: str) -> P_co: ...


class Preparation(Protocol[R_contra, P]):
    """Turns rows into prompts: in this process (`InDriver`), or on workers (`mobula.actors.processors.pool`)."""

    @property
    def num_ahead(self) -> int:
        """How many prompts are worth being begun at a time, 1 or more."""
        ...

    def begin(self, row: R_contra, prompt_id: str) -> Future[P]:
        """Raises nothing: the future has what is wrong with the row (`SkippedSample`), or what ends the run."""
        ...


class InDriver(Generic[R, P]):
    """Implements `Preparation`: a prompt is prepared in the caller's thread as it is begun."""

    num_ahead = 1

    def __init__(self, processor: PromptMaker[R, P]) -> None:
        self._processor = processor

    def begin(self, row: R, prompt_id: str) -> Future[P]:
        try:
            prompt = self._processor.prepare(row, prompt_id)
        except Exception as error:  # raised where the prompt is taken, whether it skips the row or ends the run
            return failed(error)
        begun: Future[P] = Future()
        begun.set_result(prompt)
        return begun


class RowChecker(Protocol[R_contra]):
    """Says how many tokens a row's prompt takes, or raises a `SkippedSample`."""

    def check(self, row: R_contra) -> int: ...


Difficulty = Callable[[R, int], float]
"""(row, tokens of its prompt) -> its place in a curriculum: `Curriculum.difficulty`."""


class Processor(PromptMaker[R_contra, P_co], RowChecker[R_contra], Protocol):
    """A processor of `mobula.actors.processors`."""

    @property
    def media_token_ids(self) -> tuple[int, ...]:
        """Ids that are never sampled."""
        ...

    def num_media(self, row: R_contra) -> int:
        """How many media the prompt of a row has."""
        ...


class PromptSource(Generic[R, P]):
    """An endless stream of prompts whose order is a pure function of (seed, epoch, position).

    Up to `num_ahead` prompts of `preparation` are prepared at a time, and handed out in order.

    Every epoch is a permutation of its own. A prompt's id carries its place in the order, so a checkpoint needs only
    `cursor` and the ids of prompts that were handed out and not yet trained on:

        >>> source.restore(cursor=saved.cursor, pending=[*saved.in_flight, *saved.pending])
        >>> source.next()  # first the pending ones, then on from the cursor
    """

    def __init__(
        self,
        rows: Sequence[R],
        preparation: Preparation[R, P],
        *,
        seed: int,
        split_name: str,
        on_skipped: Callable[[Skipped], None] = lambda skipped: None,
        is_open: Callable[[R], bool] | None = None,
    ) -> None:
        """With `is_open`, rows that are not when their turn comes are passed over, until the next epoch."""
        if not rows:
            raise DatasetError(f"the split {split_name} has no rows: set data.path to a folder that has some")
        self._rows = endless(rows, seed)
        self._preparation = preparation
        self._split_name = split_name
        self._on_skipped = on_skipped
        self._is_open = is_open
        self._cursor = 0
        self._pending: deque[int] = deque()
        self._ahead: deque[Future[P] | None] = deque()  # of the indices that come next; None: a row was closed
        self._skipped: dict[str, Skipped] = {}

    @property
    def cursor(self) -> int:
        """Index of the first prompt that was never handed out."""
        return self._cursor

    @property
    def pending(self) -> tuple[str, ...]:
        """Ids that `restore` was given and `next` has not handed out again yet."""
        return tuple(self.id_at(index) for index in self._pending)

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """The unusable samples met so far, each once."""
        return tuple(self._skipped.values())

    def prompt_at(self, index: int) -> P:
        """The prompt at one index of the endless order.

        Raises:
            SkippedSample: the row there is unusable.
        """
        return self._begin(index).result()

    def next(self) -> P:
        """The next usable prompt; unusable rows are skipped, counted by reason and named once.

        Raises:
            DatasetError: no row of a whole epoch is usable.
        """
        for _ in range(len(self._pending) + 2 * len(self._rows)):  # a whole epoch lies within two
            while len(self._ahead) < self._preparation.num_ahead:
                index = self._upcoming(len(self._ahead))
                self._ahead.append(self._begin(index) if self._is_asked(index) else None)
            index, begun = self._take_index(), self._ahead.popleft()
            try:
                if self._is_open is None or self._is_open(self._rows.row(index)):
                    return (begun or self._begin(index)).result()
            except SkippedSample as error:
                self._skip(self._sample_at(index), error)
        raise DatasetError(
            f"no row of the split {self._split_name} is usable{first_few(self.skipped)}: "
            "fix the rows or set data.path to another folder"
        )

    def restore(self, cursor: int, pending: Sequence[str]) -> None:
        """Go on from a checkpoint; the prompts with the ids `pending` come first, in this order.

        Raises:
            DatasetError: an id is not at its place, so the rows or the seed are not those of the checkpoint.
        """
        indices = [self.index_of(prompt_id) for prompt_id in pending]
        self._cursor = cursor
        self._pending = deque(indices)
        for begun in self._ahead:
            if begun is not None:
                begun.cancel()
        self._ahead.clear()

    def id_at(self, index: int) -> str:
        """The id of the prompt at one index of the endless order."""
        epoch, position = divmod(index, len(self._rows))
        return f"{epoch}/{position}/{self._sample_at(index)}"

    def index_of(self, prompt_id: str) -> int:
        """The index of an id in the endless order.

        Raises:
            DatasetError: it is not at its place, so the rows or the seed are not those that it was made from.
        """
        epoch, position, _ = prompt_id.split("/", maxsplit=2)
        index = int(epoch) * len(self._rows) + int(position)
        if self.id_at(index) != prompt_id:
            raise DatasetError(
                f"the checkpoint has prompt {prompt_id} where the split {self._split_name} has "
                f"{self.id_at(index)}: resume with the data.path and seed that the run began with"
            )
        return index

    def _begin(self, index: int) -> Future[P]:
        try:
            row = self._rows.row(index)
        except Exception as error:  # it is raised where the prompt is asked for
            return failed(error)
        return self._preparation.begin(row, self.id_at(index))

    def _is_asked(self, index: int) -> bool:
        """Whether the row there is worth being prepared ahead: it is open now, or there is something wrong with it."""
        try:
            return self._is_open is None or self._is_open(self._rows.row(index))
        except SkippedSample:
            return True

    def _upcoming(self, place: int) -> int:
        """The index that `next` takes behind `place` others."""
        num_pending = len(self._pending)
        return self._pending[place] if place < num_pending else self._cursor + place - num_pending

    def _take_index(self) -> int:
        if self._pending:
            return self._pending.popleft()
        self._cursor += 1
        return self._cursor - 1

    def _sample_at(self, index: int) -> str:
        """The id of the row, or the name of a record that is none."""
        try:
            return self._rows.row(index).sample_id
        except RowError as error:
            return error.sample

    def _skip(self, sample_id: str, error: SkippedSample) -> None:
        if sample_id not in self._skipped:
            self._skipped[sample_id] = Skipped(sample_id, error.reason, str(error))
            self._on_skipped(self._skipped[sample_id])
            logger.warning("skipped %s of %s: %s", sample_id, self._split_name, error)


@dataclass(frozen=True)
class PromptSet(Generic[P_co]):
    """A fixed list of prompts, and the rows that were left out of it."""

    prompts: tuple[P_co, ...]
    skipped: tuple[Skipped, ...]


def fixed_prompts(split: Split[R], preparation: Preparation[R, P], num_prompts: int) -> PromptSet[P]:
    """The first `num_prompts` usable prompts in file order, always the same; fewer if the split has no more.

    Raises:
        DatasetError: no row is usable.
    """
    prompts: list[P] = []
    skipped: list[Skipped] = []
    for sample, begun in _begun_ahead(split, preparation):
        try:
            prompts.append(begun.result())
        except SkippedSample as error:
            skipped.append(_skipped(sample, error))
        if len(prompts) == num_prompts:
            break
    if not prompts:
        raise DatasetError(f"no row of the split {split.name} is usable{first_few(skipped)}: fix the rows")
    return PromptSet(tuple(prompts), tuple(skipped))


def _begun_ahead(split: Split[R], preparation: Preparation[R, P]) -> Iterator[tuple[str, Future[P]]]:
    """Every row's id and prompt, in file order; a few of them are under way at a time."""
    ahead: deque[tuple[str, Future[P]]] = deque()
    for position in range(len(split.rows)):
        try:
            row = split.rows[position]
        except RowError as error:
            ahead.append((error.sample, failed(error)))
        else:
            ahead.append((row.sample_id, preparation.begin(row, f"{split.name}/{position}/{row.sample_id}")))
        if len(ahead) >= preparation.num_ahead:
            yield ahead.popleft()
    yield from ahead


def failed(error: Exception) -> Future[Any]:
    """A future that has failed with `error`."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


@dataclass(frozen=True)
class PreflightReport(Generic[R_co]):
    """The content of a split, as it was found before training starts."""

    rows: Sequence[R_co]  # those that are fit to be prompts, and those that were not checked
    skipped: tuple[Skipped, ...]  # records that could not be read and rows that cannot be prompts
    longest_prompt_tokens: int
    fingerprint: str = ""  # of `rows`: equal ones have the same order for the same seed

    @property
    def num_skipped(self) -> dict[str, int]:
        """reason -> number of samples."""
        return count_by_reason(self.skipped)


@dataclass(frozen=True)
class CheckedRows(Generic[R_co]):
    """The rows of a split that are not known to be unusable: first those that were checked."""

    rows: Sequence[R_co]
    num_usable: int  # of those that were checked
    skipped: tuple[Skipped, ...]
    longest_prompt_tokens: int
    fingerprint: str


def preflight(
    split: Split[R],
    processor: RowChecker[R],
    *,
    max_skipped_fraction: float,
    max_checked_rows: int,
    difficulty: Difficulty[R] | None = None,
) -> PreflightReport[R]:
    """Check the rows of a split (`checked_rows`), and refuse it if too many are unusable.

    Raises:
        DatasetError: more than `data.max_skipped_fraction` of the checked rows is unusable, or all of them; or a
            curriculum has rows that are not checked.
    """
    found = checked_rows(split, processor, max_checked_rows, difficulty)
    _refuse_if_too_many_skipped(split, found.num_usable, found.skipped, max_skipped_fraction)
    return PreflightReport(found.rows, found.skipped, found.longest_prompt_tokens, found.fingerprint)


def checked_rows(
    split: Split[R], processor: RowChecker[R], max_checked_rows: int, difficulty: Difficulty[R] | None = None
) -> CheckedRows[R]:
    """Check rows: their images' headers, their placeholders, their length, their ids. No image is decoded.

    The first `max_checked_rows` are checked, all of them for 0; those behind are checked when they are asked. A
    curriculum orders rows by what the check says of them.

    Raises:
        DatasetError: a curriculum has rows that are not checked.
    """
    rows, skipped = split.rows, list(split.skipped)
    num_checked = min(len(rows), max_checked_rows) if max_checked_rows else len(rows)
    if difficulty is not None and num_checked < len(rows):
        raise DatasetError(
            f"data.curriculum orders rows that were checked, and data.max_checked_rows={max_checked_rows} leaves "
            f"{len(rows) - num_checked:,} of the split {split.name} unchecked: set data.max_checked_rows=0"
        )
    usable, difficulties, seen, longest = array("q"), array("d"), set[int](), 0
    digest = hashlib.sha256()
    for place in range(num_checked):
        sample = ""
        try:
            row = rows[place]
            sample = row.sample_id
            _refuse_duplicate(row, place, rows, seen)
            num_tokens = processor.check(row)
            if difficulty is not None:
                difficulties.append(difficulty(row, num_tokens))
            longest = max(longest, num_tokens)
            usable.append(place)
            digest.update(f"{place} {sample}\0".encode())
        except SkippedSample as error:
            skipped.append(_skipped(sample, error))
    num_usable = len(usable)
    usable.extend(range(num_checked, len(rows)))
    digest.update(difficulties.tobytes())
    fingerprint = f"{len(usable)} of {len(rows)}, {digest.hexdigest()[:8]}"
    return CheckedRows(_chosen(rows, usable, difficulties), num_usable, tuple(skipped), longest, fingerprint)


def _skipped(sample: str, error: SkippedSample) -> Skipped:
    """`sample` is the row's id; a record that is no row names itself."""
    return Skipped(error.sample if isinstance(error, RowError) else sample, error.reason, str(error))


def _refuse_duplicate(row: R, place: int, rows: Sequence[R], seen: set[int]) -> None:
    """Of rows with the same id the first is kept; `seen` holds the hashes of ids."""
    key = hash(row.sample_id)
    if key in seen:
        name = f"{rows.name(place)} ({row.sample_id})" if isinstance(rows, LazyRows) else row.sample_id
        raise RowError("duplicate_id", f"another row before it has the id {row.sample_id!r}", name)
    seen.add(key)


def _chosen(rows: Sequence[R], places: Sequence[int], difficulty: Sequence[float]) -> Sequence[R]:
    if isinstance(rows, LazyRows):
        hard = np.asarray(difficulty, dtype=np.float64) if difficulty else None
        return rows.chosen(np.asarray(places, dtype=np.int64), hard)
    return tuple(rows[place] for place in places)


def _refuse_if_too_many_skipped(
    split: Split[AnyRow], num_usable: int, skipped: Sequence[Skipped], max_skipped_fraction: float
) -> None:
    total = num_usable + len(skipped)
    if not num_usable or len(skipped) > max_skipped_fraction * total:
        reasons = ", ".join(f"{reason} {number}" for reason, number in count_by_reason(skipped).items())
        raise DatasetError(
            f"{len(skipped)} of {total} samples of the split {split.name} are unusable: {reasons}{first_few(skipped)}, "
            f"data.max_skipped_fraction is {max_skipped_fraction:g}: fix them or raise it"
        )
