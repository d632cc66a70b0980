"""JSONL files: one JSON object a line; blank lines are passed over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mobula.actors.datasets.readers.base import SUFFIXES, Opened, Record, Table, files_of, without_nulls
from mobula.actors.datasets.readers.json_records import FileSpans, JsonTable, parse_object
from mobula.actors.datasets.rows import RowError
from mobula.cluster.errors import DatasetError
from mobula.cluster.records.json_lines import line_positions, read_lines


def open_jsonl(opened: Opened) -> Table:
    return lines_table(opened.path, files_of(opened, SUFFIXES["jsonl"]))


def lines_table(root: Path, files: list[Path]) -> JsonTable:
    """The lines of `files`."""
    return JsonTable(root, [line_spans(file) for file in files], "line")


def line_spans(file: Path) -> FileSpans:
    """Byte positions of the lines that are not empty.

    Raises:
        DatasetError: the file is compressed, or in another encoding than UTF-8.
    """
    try:
        return FileSpans(file, line_positions(file))
    except ValueError as error:
        raise DatasetError(str(error)) from error


def read_objects(file: Path) -> Iterator[tuple[int, Record | RowError]]:
    """Number, from 1, and object of every line that holds anything, without missing values; a line that is no object
    is its error.

    Raises:
        DatasetError: as `line_spans`.
    """
    try:
        for number, line in read_lines(file):
            try:
                yield number, without_nulls(parse_object(line, "line"))
            except RowError as error:
                yield number, error
    except ValueError as error:
        raise DatasetError(str(error)) from error
