"""JSON objects in files by place: read at their offsets."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from mobula.actors.datasets.readers.base import Record, read_one_by_one
from mobula.actors.datasets.rows import RowError
from mobula.cluster.records.json_lines import parse_json


def parse_object(text: bytes, what: str) -> Record:
    """The object of one line or element.

    Raises:
        RowError: it is no JSON object, or holds text that cannot be encoded.
    """
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
        """`spans` are (start, length, number in the file) of every record."""
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
    """JSON objects of several files; only their offsets are in memory."""

    def __init__(self, root: Path, files: list[FileSpans], what: str) -> None:
        """`what` is a record in the words of the user: line, element."""
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

    def record(self, place: int) -> Record:
        file, row = self._find(place)
        spans = self._files[file]
        text = os.pread(self._descriptors[file], int(spans.lengths[row]), int(spans.starts[row]))
        return self.parsed(text)

    def parsed(self, text: bytes) -> Record:
        """The record that stands in some bytes of a file."""
        return parse_object(text, self._what)

    def name(self, place: int) -> str:
        file, row = self._find(place)
        return f"{self._files[file].file.name}:{self._files[file].numbers[row]}"

    def _find(self, place: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._ends, place, side="right"))
        return file, place - (int(self._ends[file - 1]) if file else 0)
