"""Opens a split: its files, sources and rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path, PurePath
from typing import Any, Generic

import numpy as np

from mobula.actors.datasets.formats.base import Draft, RowFormat, finish, first_of, named, present
from mobula.actors.datasets.formats.records import (
    SHARED_COLUMNS,
    format_of,
    system_turn,
    template_of,
    unread_fields,
    without,
)
from mobula.actors.datasets.media import (
    AudioInputs,
    DownloadLimits,
    ImageInputs,
    MediaDownloads,
    MediaInputs,
    VideoInputs,
)
from mobula.actors.datasets.mixture import CURRICULA, Curriculum, LazyRows, MixedRows, Shuffled, windowed_order
from mobula.actors.datasets.readers import reader_of
from mobula.actors.datasets.readers.files import Opened, Record, Table, read_objects, refuse_unread, without_nulls
from mobula.actors.datasets.rows import R, Row, RowError, Skipped, Split, first_few
from mobula.cluster.errors import DatasetError, SkippedSample, SplitNotFoundError
from mobula.configs.near_paths import near
from mobula.configs.schema.data import DataConfig, DataKind, SourceConfig


def read_split(
    folder: Path, split: str, key: str, read: Callable[[Record, str], R], *, numbers_ids: bool = False
) -> Split[R]:
    """The rows of `<folder>/<split>.jsonl`: `read` gets the object of a line and its id; `key` names the folder. With
    `numbers_ids` an id has the number of its line behind it."""
    file = folder / f"{split}.jsonl"
    if not file.is_file():
        refuse_unread(folder, split)
        raise SplitNotFoundError(f"{file} does not exist: set {key} to a folder that holds {split}.jsonl{near(file)}")
    rows: dict[str, R] = {}
    skipped: list[Skipped] = []
    for number, fields in read_objects(file):
        name = f"{split}-{number}"
        try:
            if isinstance(fields, RowError):
                raise fields
            if (given := present(fields, "id")) is not None:
                name = f"{given}-{number}" if numbers_ids else given
            row = read(fields, name)
            if name in rows:
                raise RowError("duplicate_id", f"another row before it has the id {name!r}")
            rows[name] = row
        except SkippedSample as why:
            skipped.append(Skipped(f"{file.name}:{number} ({name})", why.reason, str(why)))
    if not rows:
        raise DatasetError(f"{file} has no usable row{first_few(skipped)}: fill it, or set {key} to another folder")
    return Split(split, tuple(rows.values()), tuple(skipped))


TRAIN, HELD_OUT = "train", ("validation", "test")
_logger = logging.getLogger(__name__)


class Splits(Generic[R]):
    """Reads splits by name. Data with the split `train` alone are split: validation and test are a share of its rows,
    drawn by a fixed seed, and train has the others. Of data with one of the two, the other is the same rows."""

    def __init__(self, read: Callable[[str], Split[R]], fraction: float) -> None:
        """`fraction` is `data.validation_fraction`; with 0, a split that is not there is an error."""
        self._read = cache(read)
        self._fraction = fraction

    def __call__(self, name: str) -> Split[R]:
        if self._fraction == 0 or name not in (TRAIN, *HELD_OUT):
            return self._read(name)
        order = HELD_OUT if name == TRAIN else dict.fromkeys((name, *HELD_OUT))
        there = next((split for split in order if self._has(split)), None)
        if there == name or name == TRAIN and there is not None:
            return self._read(name)
        if there is not None:
            _logger.info("there are no rows of the split %s: those of %s are read", name, there)
            return replace(self._read(there), name=name)
        split = self._read(TRAIN)
        num = len(split.rows)
        drawn = np.random.default_rng(0).permutation(num)[: min(num - 1, max(1, round(self._fraction * num)))]
        indices = np.sort(drawn) if name != TRAIN else np.delete(np.arange(num), drawn)
        if name != TRAIN:
            text = "there are no rows of the split %s: %d of %d rows of train are held out (data.validation_fraction)"
            _logger.info(text, name, len(indices), num)
        skipped = split.skipped if name == TRAIN else ()
        return Split(name, chosen_rows(split.rows, indices), skipped)

    def _has(self, name: str) -> bool:
        try:
            self._read(name)
        except SplitNotFoundError:
            return False
        return True


def chosen_rows(
    rows: Sequence[R], indices: Sequence[int] | np.ndarray, difficulty: Sequence[float] = ()
) -> Sequence[R]:
    """The rows at sorted `indices`; `difficulty` of each is for a curriculum."""
    if isinstance(rows, LazyRows):
        difficulties = np.asarray(difficulty, dtype=np.float64) if len(difficulty) else None
        return rows.chosen(np.asarray(indices, dtype=np.int64), difficulties)
    return tuple(rows[index] for index in indices)


Change = Callable[[Row], Row] | None  # of each row that is read
NUM_CACHED = 8  # rows; each is read twice in a row, for the id and for the prompt


@dataclass(eq=False)
class RowReader:
    """Reads the rows of a table on demand."""

    table: Table
    format: RowFormat
    media: Mapping[str, MediaInputs]  # kind of medium -> how it is resolved
    data: DataConfig
    source: SourceConfig
    label_key: str  # metadata key of a row's label
    change: Change = None

    def __post_init__(self) -> None:
        self.placeholders = self.data.placeholders.model_dump()
        self.row = lru_cache(maxsize=NUM_CACHED)(self._read_row)

    def order_of(self, indices: np.ndarray, seed: int, epoch: int) -> np.ndarray:
        """Returns int64 [N]: an order of the rows at sorted `indices` [N], as positions in `indices`."""
        blocks = self.table.blocks
        bounds = np.searchsorted(indices, np.concatenate([[0], np.cumsum(blocks[:, 0])]))
        chosen_blocks = np.stack([np.diff(bounds), blocks[:, 1]], axis=1)
        return windowed_order(chosen_blocks[chosen_blocks[:, 0] > 0], self.data.shuffle_bytes, seed, epoch)

    def _read_row(self, index: int) -> Row:
        name = self.table.name(index)
        record: Record = {}
        try:
            record = without(self._mapped(without_nulls(self.table.record(index))), self.data.ignored_fields)
            draft = self.format.read(record) if self.format.is_own else self._draft(record)
            if self.source.label:
                draft.label = self.source.label
            file, _, number = name.rpartition(":")
            default_id = f"{PurePath(file).stem}-{number}"
            row = finish(
                draft, self.media, self.placeholders, default_id=default_id, name=name, label_key=self.label_key
            )
            if self.data.repeated_ids == "number" and row.sample_id != default_id:
                row = replace(row, sample_id=f"{row.sample_id}-{index + 1}")
            return row if self.change is None else self.change(row)
        except SkippedSample as error:
            sample = f"{name} ({record['id']})" if "id" in record else name
            raise named(error, sample, self.source.columns) from error

    def _draft(self, record: Record) -> Draft:
        """Reads a record in a format of this package, with the columns that all of them share."""
        known = (*self.format.columns, *self.source.columns, self.label_key)
        unread = unread_fields(record, known, has_answers=self.format.has_answers)
        draft = self.format.read(record)
        draft.metadata = {key: value for key, value in draft.metadata.items() if key not in SHARED_COLUMNS}
        draft.template, draft.unread = template_of(record), unread
        draft.turns = [*system_turn(record, draft.turns), *draft.turns]
        return draft

    def _mapped(self, record: Record) -> Record:
        renamed: dict[str, Any] = {column: first_of(record, source) for column, source in self.source.columns.items()}
        others = {column: value for column, value in record.items() if column not in self.source.columns.values()}
        return {**others, **{column: value for column, value in renamed.items() if value is not None}}


@dataclass(eq=False)
class TableRows(LazyRows[Row]):
    """Rows of a table, in the order of the table."""

    reader: RowReader
    indices: np.ndarray  # int64 [N]
    curriculum: Curriculum | None
    difficulty: np.ndarray | None = None  # float64 [N], of each row, for a curriculum

    def __len__(self) -> int:
        return len(self.indices)

    def row_at(self, index: int) -> Row:
        return self.reader.row(int(self.indices[index]))

    def name(self, index: int) -> str:
        return self.reader.table.name(int(self.indices[index]))

    def chosen(self, indices: np.ndarray, difficulty: np.ndarray | None = None) -> TableRows:
        return TableRows(self.reader, self.indices[indices], self.curriculum, difficulty)

    def endless(self, seed: int) -> Shuffled[Row]:
        return Shuffled(self, self.order, seed)

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """Returns int64 [N]: the order of one epoch, stage by stage."""
        curriculum = self.curriculum
        if curriculum is None or self.difficulty is None or epoch >= curriculum.num_epochs:
            return self.reader.order_of(self.indices, seed, epoch)
        stages = curriculum.stages(self.difficulty, curriculum.num_stages)
        return np.concatenate([stage[self.reader.order_of(self.indices[stage], seed, epoch)] for stage in stages])


def splits_of(data: DataConfig, label_key: str, *, fetches_late: bool = False) -> Splits[Row]:
    """The splits of the data, as `open_split` opens them."""
    return Splits(lambda name: open_split(data, name, label_key, fetches_late=fetches_late), data.validation_fraction)


def open_split(
    data: DataConfig, split: str, label_key: str, *, fetches_late: bool = False, change: Change = None
) -> Split[Row]:
    """Opens a split and reads an index of its rows; `label_key` is the metadata key of a row's label. With
    `fetches_late`, rows have `WebFile`s, which are downloaded by the process that reads them; otherwise web files are
    downloaded when a row is read. `change` is applied to each row."""
    if data.kind is not DataKind.MIXTURE:
        return Split(split, _open_source(data, data, data.path, split, label_key, fetches_late, change), ())
    parts = {
        name: _open_source(data, source, _path_of(data, source), split, label_key, fetches_late, change)
        for name, source in data.mixture.sources.items()
    }
    weights = {name: source.weight for name, source in data.mixture.sources.items()}
    mixed = MixedRows(parts, weights, by_rows=data.mixture.weight_by_rows, temperature=data.mixture.temperature)
    return Split(split, mixed, ())


def curriculum_of(data: DataConfig) -> Curriculum | None:
    """The curriculum of the training split, or None."""
    config = data.curriculum
    if config.kind == "none":
        return None
    return Curriculum(CURRICULA[config.kind], config.key, config.num_stages, config.num_epochs)


def _path_of(data: DataConfig, source: SourceConfig) -> Path:
    """The path of a source: relative to `data.path`, or a name on the hub if there is no such folder."""
    path = data.path / source.path
    return source.path if source.kind is DataKind.HUGGINGFACE and not path.is_dir() else path


def _open_source(
    data: DataConfig, source: SourceConfig, path: Path, split: str, label_key: str, fetches_late: bool, change: Change
) -> LazyRows[Row]:
    row_format = format_of(source, data.row_format_options)
    columns = row_format.columns if row_format.is_own else (*row_format.columns, *SHARED_COLUMNS)
    unknown = sorted(set(source.columns) - {*columns, label_key})
    if unknown:
        raise DatasetError(
            f"data.columns has {unknown[0]}, which is no column of data.row_format={source.row_format}: it has "
            f"{', '.join(columns)}"
        )
    named = Opened(
        path,
        source.splits.get(split, split),
        cache=data.cache_path,
        max_block_bytes=data.shuffle_bytes,
        subset=source.huggingface.subset,
        num_streamed=source.huggingface.streamed_rows,
    )
    table = reader_of(source, data.kind_options)(named)
    if len(table) == 0:
        raise DatasetError(f"{table.source} has no usable row: fill it, or set data.path to another folder")
    root = data.path / source.media_path if source.media_path else table.root
    # `datasets` returns absolute paths for files in a folder; they are confined to the folder like all others.
    takes_absolute = source.media_path != "" or source.kind is DataKind.HUGGINGFACE

    folder = (data.cache_path / "downloads").absolute()  # processes on other nodes have other working directories
    kinds: dict[str, tuple[type[MediaInputs], int, str]] = {
        "image": (ImageInputs, data.max_image_bytes, "data.max_image_bytes"),
        "video": (VideoInputs, data.video.max_file_bytes, "data.video.max_file_bytes"),
        "audio": (AudioInputs, data.audio.max_file_bytes, "data.audio.max_file_bytes"),
    }
    media = {}
    for kind, (make, max_bytes, key) in kinds.items():
        limits = DownloadLimits(max_bytes, key, data.max_redirects, data.download_timeout_s)
        downloads = MediaDownloads(folder, data.allowed_hosts, limits)
        media[kind] = make(root, downloads.later if fetches_late else downloads.fetch, takes_absolute=takes_absolute)
    reader = RowReader(table, row_format, media, data, source, label_key, change)
    return TableRows(reader, np.arange(len(table)), curriculum_of(data))
