"""Rows of offline jobs: one JSON object a line of `<folder>/<split>.jsonl`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mobula.actors.datasets.formats.base import present
from mobula.actors.datasets.readers.base import Record, refuse_unread
from mobula.actors.datasets.readers.json_files import read_objects
from mobula.actors.datasets.rows import R, RowError, Skipped, Split, first_few
from mobula.cluster.errors import DatasetError, SkippedSample
from mobula.configs.near_paths import near


def read_split(
    folder: Path, split: str, key: str, read: Callable[[Record, str], R], *, numbers_ids: bool = False
) -> Split[R]:
    """The rows of `<folder>/<split>.jsonl`: `read` gets the object of a line and its id; `key` names the folder. With
    `numbers_ids` an id has the number of its line behind it.

    Raises:
        DatasetError: there is no such file, or no line of it is usable.
    """
    file = folder / f"{split}.jsonl"
    if not file.is_file():
        refuse_unread(folder, split)
        raise DatasetError(f"{file} does not exist: set {key} to a folder that holds {split}.jsonl{near(file)}")
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
