"""Reads JSON Lines and JSON values as written by common tools; used by every command."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # of UTF-8; Windows tools write it at the start of a file
UNREADABLE = (
    (b"\xff\xfe", "UTF-16: convert it to UTF-8"),
    (b"\xfe\xff", "UTF-16: convert it to UTF-8"),
    (b"\x1f\x8b", "compressed with gzip: unpack it"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd: unpack it"),
    (b"BZh", "compressed with bzip2: unpack it"),
    (b"\xfd7zXZ", "compressed with xz: unpack it"),
    (b"PK\x03\x04", "a ZIP archive: unpack it"),
    (b"PAR1", "a Parquet file: give it the suffix .parquet, and set data.kind=parquet"),
)
HEAD_BYTES = 6


class _Spelled:
    """A number that keeps its source text: an answer of 7.50 must not become 7.5."""

    def __init__(self, spelling: str) -> None:
        self.spelling = spelling

    def __str__(self) -> str:
        return self.spelling


class SpelledInt(_Spelled, int): ...


class SpelledFloat(_Spelled, float): ...


def line_positions(file: Path) -> Iterator[tuple[int, int, int]]:
    """Yields start, length and number (from 1) of every non-empty line.

    Only a line feed ends a line: U+2028, U+0085 and a carriage return may be part of a text.
    """
    check_encoding(file)
    with file.open("rb") as lines:
        start = 0
        for number, line in enumerate(lines, start=1):
            if line.removeprefix(BYTE_ORDER_MARK).strip():
                yield start, len(line), number
            start += len(line)


def read_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yields number (from 1) and content of every non-empty line."""
    with file.open("rb") as content:
        for start, length, number in line_positions(file):
            content.seek(start)
            yield number, content.read(length)


def parse_json(text: bytes) -> Any:
    """Parses the JSON value of a line. NaN, which pandas and Python write for a missing value, becomes None."""
    try:
        value = _DECODER.decode(text.removeprefix(BYTE_ORDER_MARK).decode())
        if b"\\u" in text:  # tokenizers refuse half a surrogate pair
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError(str(error)) from error
    except UnicodeDecodeError as error:
        byte = text.removeprefix(BYTE_ORDER_MARK)[error.start]
        raise ValueError(f"byte 0x{byte:02x} at position {error.start} is no UTF-8: convert the file") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{error}{_fault_of_lines(text, error)}") from error
    return value


def check_encoding(file: Path) -> None:
    """Raises: ValueError: the file is compressed, or in another encoding than UTF-8."""
    refuse_compressed(file)
    if b"\0" in _head(file):
        raise ValueError(f"{file} is no UTF-8 text: convert it")


def refuse_compressed(file: Path) -> None:
    """Raises: ValueError: the file is compressed or has another encoding than UTF-8, by its first bytes."""
    file_type = next((name for mark, name in UNREADABLE if _head(file).startswith(mark)), None)
    if file_type is not None:
        raise ValueError(f"{file} is {file_type}")


def _head(file: Path) -> bytes:
    with file.open("rb") as content:
        return content.read(HEAD_BYTES)


def _fault_of_lines(text: bytes, error: json.JSONDecodeError) -> str:
    if b"\r" in text.strip():
        return ": lines end in carriage returns alone, write line feeds"
    if error.msg == "Extra data":
        return ": there is more than one value"
    return ": the value does not end" if error.pos >= len(error.doc.rstrip()) else ""


def _without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice in an object")
    return fields


_DECODER = json.JSONDecoder(
    object_pairs_hook=_without_duplicates,
    parse_int=SpelledInt,
    parse_float=SpelledFloat,
    parse_constant=lambda name: None if name == "NaN" else SpelledFloat(name),
)
