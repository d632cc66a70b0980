"""Reads JSONL in stretches of bytes, so that a file may be larger than memory and be read by several processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any

import msgspec

from mobula.cluster.records.json_lines import parse_json
from mobula.rewards.offline.sources.records import (
    MAX_NAMED_LINES,
    BrokenRecordError,
    Record,
    from_line,
    from_values,
    may_repeat_a_key,
    with_everything,
)

MIN_STRETCH_BYTES, MAX_STRETCH_BYTES = 256 << 10, 2 << 20
NUM_STRETCHES = 32  # of a file of medium size: enough for the processes to finish together
MAX_LINE_BYTES = 64 << 20
_SKIP_BYTES = 1 << 20
_decode_all = msgspec.json.Decoder(Record).decode
_decode_any = msgspec.json.Decoder().decode


@dataclass
class Batch:
    """The whole records of a stretch, and what was no record; lines are counted from 1 within the stretch."""

    records: list[Record]
    num_lines: int = 0
    num_broken: int = 0
    broken: Sequence[tuple[int, str]] = ()  # the first ones

    def pieces(self, size: int) -> Iterator[Batch]:
        """The batch in pieces of at most `size` records; the first one has all the lines."""
        yield replace(self, records=self.records[:size])
        for start in range(size, len(self.records), size):
            yield Batch(self.records[start : start + size])


@dataclass(frozen=True)
class LineRange:
    """The lines of a file that begin in the bytes [start, end)."""

    path: Path
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        return f"bytes {self.start:,} to {self.end:,} of {self.path}"

    def batches(self, *, with_metadata: bool) -> Iterator[Batch]:
        """One batch with all lines of the stretch."""
        lines, num_too_long = self._lines()
        yield _read(lines, num_too_long, with_metadata)

    def _lines(self) -> tuple[list[bytes], int]:
        """The lines without their ends; the last one may be too long, and is counted in place of being read."""
        with self.path.open("rb") as file:
            start = _line_start(file, self.start, self.end)
            if start >= self.end:
                return [], 0
            data = file.read(self.end - start)
            num_too_long = 0
            if not data.endswith(b"\n"):
                rest = file.readline(MAX_LINE_BYTES)
                if len(rest) == MAX_LINE_BYTES and not rest.endswith(b"\n"):
                    data, num_too_long = data[: data.rfind(b"\n") + 1], 1
                else:
                    data += rest
        lines = data.split(b"\n")
        if not lines[-1]:
            lines.pop()
        return lines, num_too_long


def stretches(path: Path, num_bytes: int | None = None) -> list[LineRange]:
    """A file cut into stretches of `num_bytes`, or of a size that fits its own."""
    size = os.path.getsize(path)
    num_bytes = num_bytes or min(max(size // NUM_STRETCHES, MIN_STRETCH_BYTES), MAX_STRETCH_BYTES)
    return [LineRange(path, start, min(start + num_bytes, size)) for start in range(0, size, num_bytes)]


def _line_start(file: BufferedReader, start: int, end: int) -> int:
    """Position of the first line at or after `start`, at which the file is left. Lines of any length are skipped."""
    if start == 0:
        return 0
    file.seek(start - 1)
    place = start - 1
    while place < end:
        skipped = file.readline(_SKIP_BYTES)
        place += len(skipped)
        if skipped.endswith(b"\n") or not skipped:
            break
    return place


def _read(lines: list[bytes], num_too_long: int, with_metadata: bool) -> Batch:
    if not with_metadata and not num_too_long and not any(map(may_repeat_a_key, lines)):
        try:
            records = [_decode_all(line) for line in lines]
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            pass  # at least one line is not as it should be: go through them again, one by one
        else:
            if all(record.everything is None for record in records):
                return Batch(records, len(lines))
    return _read_carefully(lines, num_too_long, with_metadata)


def _read_carefully(lines: list[bytes], num_too_long: int, with_metadata: bool) -> Batch:
    """Every line by itself; what is no record is named, and blank lines are passed over."""
    records, broken, num_broken = [], [], 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            records.append(_with_metadata(line) if with_metadata else from_line(line))
        except BrokenRecordError as error:
            num_broken += 1
            if len(broken) < MAX_NAMED_LINES:
                broken.append((number, str(error)))
    if num_too_long:
        num_broken += 1
        broken = [*broken, (len(lines) + 1, f"longer than {MAX_LINE_BYTES:,} bytes")][:MAX_NAMED_LINES]
    return Batch(records, len(lines) + num_too_long, num_broken, broken)


def _with_metadata(line: bytes) -> Record:
    values: Any = None
    if not may_repeat_a_key(line):
        with suppress(msgspec.MsgspecError, RecursionError, UnicodeError):
            values = _decode_any(line)
    if values is None:
        try:
            values = parse_json(line)  # slow, lenient, and names what is wrong
        except ValueError as error:
            raise BrokenRecordError(f"no JSON ({error})") from error
    return with_everything(from_values(values), values)
