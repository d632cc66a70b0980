"""JSONL files: one JSON object a line; blank lines are passed over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from actors.datasets.readers.base import Opened, Table, files_of
from actors.datasets.readers.json_records import FileSpans, JsonTable


def open_jsonl(opened: Opened) -> Table:
    return lines_table(opened.path, files_of(opened, (".jsonl",)))


def lines_table(root: Path, files: list[Path]) -> JsonTable:
    """The lines of `files`."""
    return JsonTable(root, [line_spans(file) for file in files], "line")


def line_spans(file: Path) -> FileSpans:
    """Byte positions of the lines that are not empty."""
    return FileSpans(file, _lines(file))


def _lines(file: Path) -> Iterator[tuple[int, int, int]]:
    """Start, length and number, from 1, of every line that holds anything."""
    with file.open("rb") as lines:
        start = 0
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield start, len(line), number
            start += len(line)
