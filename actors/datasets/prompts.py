"""Prompts in a reproducible, endless order for training, fixed prompts for evaluation, and preflight checks of rows."""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from mobula.actors.datasets.mixture import LazyRows, endless
from mobula.actors.datasets.open_split import chosen_rows
from mobula.actors.datasets.rows import AnyRow, R, R_co, RowError, Skipped, Split, count_by_reason, first_few
from mobula.cluster.errors import DatasetError, SkippedSample
from mobula.cluster.records.trajectory import Prompt

logger = logging.getLogger(__name__)
P = TypeVar("P")  # a `Prompt`; for offline jobs a `ScoredGroup`
P_co = TypeVar("P_co", covariant=True)
R_contra = TypeVar("R_contra", bound=AnyRow, contravariant=True)


class PromptMaker(Protocol[R_contra, P_co]):
    """Turns rows into prompts (`mobula.actors.processors.chat.ChatProcessor`)."""

    def prepare(self, row: R_contra, prompt_id: str) -> P_co: ...


class Preparation(Protocol[R_contra, P]):
    """Turns rows into prompts: in this process (`InDriver`), or on workers (`mobula.actors.processors.pool`)."""

    @property
    def num_ahead(self) -> int:
        """Number of prompts to prepare ahead, at least 1."""

    def begin(self, row: R_contra, prompt_id: str) -> Future[P]:
        """Starts to prepare a prompt. Errors are set on the future: `SkippedSample`, or an error that ends the run."""


class InDriver(Generic[R, P]):
    """Implements `Preparation`: `begin` prepares the prompt in the caller's thread."""

    num_ahead = 1

    def __init__(self, processor: PromptMaker[R, P]) -> None:
        self._processor = processor

    def begin(self, row: R, prompt_id: str) -> Future[P]:
        try:
            prompt = self._processor.prepare(row, prompt_id)
        except Exception as error:  # the caller handles it when it takes the prompt
            return failed(error)
        begun: Future[P] = Future()
        begun.set_result(prompt)
        return begun


class RowChecker(Protocol[R_contra]):
    """Returns the number of tokens of a row's prompt, or raises a `SkippedSample`."""

    def check(self, row: R_contra) -> int: ...


Difficulty = Callable[[R, int], float]
"""(row, tokens of the prompt) -> difficulty: `Curriculum.difficulty`."""
Note = Callable[[R], Iterable[str]]
"""Yields remarks on a usable row; equal ones are counted."""


class Processor(PromptMaker[R_contra, P_co], RowChecker[R_contra], Protocol):
    """A processor of `mobula.actors.processors`."""

    @property
    def media_token_ids(self) -> tuple[int, ...]:
        """Ids that are never sampled."""

    @property
    def template_token_ids(self) -> tuple[int, ...]:
        """Ids of sampled tokens that structure a response, such as the end of text and the tags of tool calls."""

    def num_media(self, row: R_contra) -> int:
        """Number of media in the prompt of a row."""


class PromptSource(Generic[R, P]):
    """An endless stream of prompts in an order that is a pure function of (seed, epoch, position).

    Prefetches up to `preparation.num_ahead` prompts and returns them in order. Every epoch has another permutation. A
    prompt's id contains its epoch and position, so a checkpoint stores only `cursor` and the ids of prompts that were
    returned and not trained yet:

        >>> source.restore(cursor=saved.cursor, pending=saved.pending)
        >>> source.next()  # first the pending prompts, then prompts from the cursor on
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
        """With `is_open`, rows that are closed when they are due are left out of the epoch."""
        if not rows:
            raise DatasetError(f"the split {split_name} has no rows: set data.path to a folder that has some")
        self._rows = endless(rows, seed)
        self._preparation = preparation
        self._split_name = split_name
        self._on_skipped = on_skipped
        self._is_open = is_open
        self._cursor = 0
        self._pending: deque[int] = deque()
        self._ahead: deque[Future[P] | None] = deque()  # prefetched prompts, in order; None if the row was closed
        self._skipped: dict[str, Skipped] = {}

    @property
    def cursor(self) -> int:
        """Index of the first prompt that `next` has never returned."""
        return self._cursor

    @property
    def pending(self) -> tuple[str, ...]:
        """Ids given to `restore` that `next` has not returned yet."""
        return tuple(self.id_at(index) for index in self._pending)

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """The unusable samples so far, each once."""
        return tuple(self._skipped.values())

    def prompt_at(self, index: int) -> P:
        """Prepares the prompt at an index of the endless order."""
        return self._begin(index).result()

    def next(self) -> P:
        """Returns the next usable prompt. Unusable rows are skipped, counted by reason and logged once."""
        for _ in range(len(self._pending) + 2 * len(self._rows)):  # two epochs from any position include a whole epoch
            num_pending = len(self._pending)
            while (num_ahead := len(self._ahead)) < self._preparation.num_ahead:
                is_pending = num_ahead < num_pending
                index = self._pending[num_ahead] if is_pending else self._cursor + num_ahead - num_pending
                self._ahead.append(self._begin(index) if self.is_open(index) else None)
            if self._pending:
                index = self._pending.popleft()
            else:
                index, self._cursor = self._cursor, self._cursor + 1
            begun = self._ahead.popleft()
            try:
                if self._is_open is None or self._is_open(self._rows.row(index)):
                    return (begun or self._begin(index)).result()
            except SkippedSample as error:
                sample = self._sample_at(index)
                if sample not in self._skipped:
                    self._skipped[sample] = Skipped(sample, error.reason, str(error))
                    self._on_skipped(self._skipped[sample])
                    logger.warning("skipped %s of %s: %s", sample, self._split_name, error)
        raise DatasetError(
            f"no row of the split {self._split_name} is usable{first_few(self.skipped)}: "
            "fix the rows or set data.path to another folder"
        )

    def restore(self, cursor: int, pending: Sequence[str]) -> None:
        """Resumes from a checkpoint. Prompts with the ids `pending` come first, in this order."""
        indices = [self.index_of(prompt_id) for prompt_id in pending]
        self._cursor = cursor
        self._pending = deque(indices)
        for begun in self._ahead:
            if begun is not None:
                begun.cancel()
        self._ahead.clear()

    def id_at(self, index: int) -> str:
        """The id of the prompt at an index of the endless order."""
        epoch, position = divmod(index, len(self._rows))
        return f"{epoch}/{position}/{self._sample_at(index)}"

    def index_of(self, prompt_id: str) -> int:
        """The index of an id in the endless order."""
        epoch, position, _ = prompt_id.split("/", maxsplit=2)
        index = int(epoch) * len(self._rows) + int(position)
        if self.id_at(index) != prompt_id:
            raise DatasetError(
                f"the checkpoint has prompt {prompt_id} where the split {self._split_name} has "
                f"{self.id_at(index)}: resume with the data.path and seed that the run began with"
            )
        return index

    def is_open(self, index: int) -> bool:
        """Whether the row at an index is open now, or is unusable and will be skipped."""
        try:
            return self._is_open is None or self._is_open(self._rows.row(index))
        except SkippedSample:
            return True

    def row_of(self, prompt_id: str) -> R:
        return self._rows.row(self.index_of(prompt_id))

    def _begin(self, index: int) -> Future[P]:
        try:
            row = self._rows.row(index)
        except Exception as error:  # raised when the prompt is taken
            return failed(error)
        return self._preparation.begin(row, self.id_at(index))

    def _sample_at(self, index: int) -> str:
        try:
            return self._rows.row(index).sample_id
        except RowError as error:
            return error.sample


@dataclass(frozen=True)
class PromptSet(Generic[P_co]):
    """A fixed list of prompts, and the skipped rows."""

    prompts: tuple[P_co, ...]
    skipped: tuple[Skipped, ...]


def fixed_prompts(split: Split[R], preparation: Preparation[R, P], num_prompts: int) -> PromptSet[P]:
    """Prepares the first `num_prompts` usable prompts in file order; fewer if the split has fewer."""
    prompts: list[P] = []
    skipped: list[Skipped] = []
    for sample, begun in _begun_ahead(split, preparation):
        try:
            prompts.append(begun.result())
        except SkippedSample as error:
            skipped.append(Skipped.of(sample, error))
        if len(prompts) == num_prompts:
            break
    if not prompts:
        raise DatasetError(f"no row of the split {split.name} is usable{first_few(skipped)}: fix the rows")
    return PromptSet(tuple(prompts), tuple(skipped))


def _begun_ahead(split: Split[R], preparation: Preparation[R, P]) -> Iterator[tuple[str, Future[P]]]:
    """Yields id and prompt of every row in file order; `num_ahead` prompts are prepared ahead."""
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


def position_of(prompt: Prompt) -> int:
    """The position of the prompt's row in its split, of a prompt that `fixed_prompts` made."""
    return int(prompt.prompt_id.split("/")[1])


def failed(error: Exception) -> Future[Any]:
    """A future that has failed with `error`."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


@dataclass(frozen=True)
class PreflightReport(Generic[R_co]):
    """The rows of a split without those known to be unusable: first the checked rows."""

    rows: Sequence[R_co]
    skipped: tuple[Skipped, ...]  # unreadable records and unusable rows
    longest_prompt_tokens: int
    fingerprint: str = ""  # hash of `rows`: with equal fingerprints and seeds, the order is equal
    notes: Mapping[str, int] = field(default_factory=dict)  # what `note` yields of a usable row -> number of rows
    num_usable: int = 0  # number of usable rows among the checked

    @property
    def num_skipped(self) -> dict[str, int]:
        """reason -> number of samples."""
        return count_by_reason(self.skipped)


def preflight(
    split: Split[R],
    processor: RowChecker[R],
    *,
    max_skipped_fraction: float,
    max_checked_rows: int,
    difficulty: Difficulty[R] | None = None,
    note: Note[R] = lambda row: (),
) -> PreflightReport[R]:
    """Checks the rows of a split (`checked_rows`), and refuses the split if too many are unusable."""
    report = checked_rows(split, processor, max_checked_rows, difficulty, note)
    num_skipped, total = len(report.skipped), report.num_usable + len(report.skipped)
    if not report.num_usable or num_skipped > max_skipped_fraction * total:
        reasons = ", ".join(f"{reason} {number}" for reason, number in report.num_skipped.items())
        raise DatasetError(
            f"{num_skipped} of {total} samples of the split {split.name} are unusable: {reasons}"
            f"{first_few(report.skipped)}, data.max_skipped_fraction is {max_skipped_fraction:g}: fix them or raise it"
        )
    return report


def checked_rows(
    split: Split[R],
    processor: RowChecker[R],
    max_checked_rows: int,
    difficulty: Difficulty[R] | None = None,
    note: Note[R] = lambda row: (),
) -> PreflightReport[R]:
    """Checks the first `max_checked_rows` rows (0 for all): headers of images, placeholders, length, ids. Decodes no
    image. Later rows are checked when they are used. For a curriculum, computes the difficulty of each row."""
    rows, skipped = split.rows, list(split.skipped)
    num_checked = min(len(rows), max_checked_rows) if max_checked_rows else len(rows)
    if difficulty is not None and num_checked < len(rows):
        raise DatasetError(
            f"data.curriculum orders rows that were checked, and data.max_checked_rows={max_checked_rows} leaves "
            f"{len(rows) - num_checked:,} of the split {split.name} unchecked: set data.max_checked_rows=0"
        )
    usable, difficulties, seen, longest = array("q"), array("d"), set[int](), 0
    digest, notes = hashlib.sha256(), Counter[str]()
    for index in range(num_checked):
        sample = ""
        try:
            row = rows[index]
            sample = row.sample_id
            if hash(sample) in seen:  # the first row with an id is kept; hashes save memory
                name = f"{rows.name(index)} ({sample})" if isinstance(rows, LazyRows) else sample
                raise RowError("duplicate_id", f"another row before it has the id {sample!r}", name)
            seen.add(hash(sample))
            num_tokens = processor.check(row)
            if difficulty is not None:
                difficulties.append(difficulty(row, num_tokens))
            longest = max(longest, num_tokens)
            usable.append(index)
            notes.update(note(row))
            digest.update(f"{index} {sample}\0".encode())
        except SkippedSample as error:
            skipped.append(Skipped.of(sample, error))
    num_usable = len(usable)
    usable.extend(range(num_checked, len(rows)))
    digest.update(difficulties.tobytes())
    fingerprint = f"{len(usable)} of {len(rows)}, {digest.hexdigest()[:8]}"
    return PreflightReport(
        chosen_rows(rows, usable, difficulties), tuple(skipped), longest, fingerprint, notes, num_usable
    )
