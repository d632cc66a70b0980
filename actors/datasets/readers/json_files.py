"""Reads JSON files: one object a line, or an array of objects; only offsets of records are in memory."""

from __future__ import annotations

import mmap
import os
import re
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mobula.actors.datasets.readers.base import (
    SUFFIXES,
    Opened,
    Record,
    Table,
    files_of,
    read_one_by_one,
    without_nulls,
)
from mobula.actors.datasets.rows import RowError
from mobula.cluster.errors import DatasetError
from mobula.cluster.records.json_lines import line_positions, parse_json, read_lines


def parse_object(text: bytes, what: str) -> Record:
    """Parses the object of a line or element."""
    try:
        record: Any = parse_json(text)
    except ValueError as error:
        raise RowError("broken_json", f"the {what} is not JSON ({error}): fix or delete it") from error
    if not isinstance(record, dict):
        as_array = what == "line" and isinstance(record, list)
        hint = (
            ", or name the file .json for data.kind=json (`mobula data convert` for offline jobs)" if as_array else ""
        )
        raise RowError("broken_json", f"the {what} is a JSON {type(record).__name__}: write an object{hint}")
    return record


class FileSpans:
    """Byte positions of the records of one file; 20 bytes a record."""

    def __init__(self, file: Path, spans: Iterable[tuple[int, int, int]]) -> None:
        """`spans`: (start, length, number in the file) of every record."""
        self.file = file
        starts, lengths, numbers = array("q"), array("q"), array("I")
        for start, length, number in spans:
            starts.append(start)
            lengths.append(length)
            numbers.append(number)
        self.starts = np.frombuffer(starts, dtype=np.int64)
        self.lengths = np.frombuffer(lengths, dtype=np.int64)
        self.numbers = np.frombuffer(numbers, dtype=np.uint32)


class JsonTable:
    """Implements `Table` for JSON objects of several files; only offsets are in memory."""

    def __init__(self, root: Path, files: list[FileSpans], what: str) -> None:
        """`what` is the name of a record in errors: line, element."""
        self.root = root
        self.source = str(files[0].file)
        self._files = files
        self._what = what
        self._descriptors = [os.open(spans.file, os.O_RDONLY) for spans in files]
        self._ends = np.cumsum([len(spans.starts) for spans in files])

    @property
    def blocks(self) -> np.ndarray:
        return read_one_by_one(len(self))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __del__(self) -> None:
        for descriptor in self.__dict__.pop("_descriptors", []):
            os.close(descriptor)

    def record(self, index: int) -> Record:
        file, row = self._locate(index)
        spans = self._files[file]
        text = os.pread(self._descriptors[file], int(spans.lengths[row]), int(spans.starts[row]))
        return self.parsed(text)

    def parsed(self, text: bytes) -> Record:
        """Parses the bytes of a record."""
        return parse_object(text, self._what)

    def name(self, index: int) -> str:
        file, row = self._locate(index)
        return f"{self._files[file].file.name}:{self._files[file].numbers[row]}"

    def _locate(self, index: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._ends, index, side="right"))
        return file, index - (int(self._ends[file - 1]) if file else 0)


def open_jsonl(opened: Opened) -> Table:
    return lines_table(opened.path, files_of(opened, SUFFIXES["jsonl"]))


def lines_table(root: Path, files: list[Path]) -> JsonTable:
    return JsonTable(root, [line_spans(file) for file in files], "line")


def line_spans(file: Path) -> FileSpans:
    """Byte positions of the lines that are not empty."""
    try:
        return FileSpans(file, line_positions(file))
    except ValueError as error:
        raise DatasetError(str(error)) from error


def read_objects(file: Path) -> Iterator[tuple[int, Record | RowError]]:
    """Yields number (from 1) and object of every line that is not empty, without missing values; for an invalid line,
    the error instead of the object.
    """
    try:
        for number, line in read_lines(file):
            try:
                yield number, without_nulls(parse_object(line, "line"))
            except RowError as error:
                yield number, error
    except ValueError as error:
        raise DatasetError(str(error)) from error


# A string, or a structural character of JSON. Possessive quantifiers: no backtracking in long strings.
TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{},]', re.DOTALL)
OPENING, CLOSING = (b"[", b"{"), (b"]", b"}")
ANYTHING = re.compile(rb"\S")


def open_json(opened: Opened) -> Table:
    files = files_of(opened, SUFFIXES["json"])
    if not all(_is_array(file) for file in files):
        return lines_table(opened.path, files)
    return JsonTable(opened.path, [FileSpans(file, _elements(file)) for file in files], "element")


def _is_array(file: Path) -> bool:
    with file.open("rb") as content:
        return content.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _elements(file: Path) -> Iterator[tuple[int, int, int]]:
    """Yields start, length and number (from 1) of every element of an array, without parsing it into memory."""
    with file.open("rb") as content, mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ) as text:
        depth, start, number = 0, 0, 0
        for token in TOKEN.finditer(text):
            symbol = token[0]
            if symbol in OPENING:
                depth += 1
                if depth == 1:
                    start = token.end()
            elif depth == 1 and symbol in (b",", b"]"):
                if text[start : token.start()].strip():
                    number += 1
                    yield start, token.start() - start, number
                start = token.end()
                depth -= symbol == b"]"
            elif symbol in CLOSING:
                depth -= 1
            if depth == 0:
                if ANYTHING.search(text, token.end()):
                    raise DatasetError(f"{file} goes on behind its array: write one array, or one object a line")
                return
    raise DatasetError(f"{file} is an array that does not end: write it again, or one object a line")
