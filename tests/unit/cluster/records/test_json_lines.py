"""Lines of JSON as other tools write them: where they end, which files are refused, and which values they hold."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import math
from pathlib import Path
from typing import Any

import pytest

from mobula.cluster.records.json_lines import line_positions, parse_json, read_lines


def test_a_line_ends_at_a_line_feed_alone(tmp_path: Path) -> None:
    texts = ["a\u2028b", "a\u2029b", "a\x85b", "a\x0bb\x0cc\x1cd", "é"]
    content = "\r\n\r\n".join(json.dumps(text, ensure_ascii=False) for text in texts) + "\r\n \t\n"
    file = tmp_path / "rows.jsonl"
    expected = dict(zip((1, 3, 5, 7, 9), texts, strict=True))
    for mark in (b"", b"\xef\xbb\xbf"):
        file.write_bytes(mark + content.encode())
        assert {number: parse_json(line) for number, line in read_lines(file)} == expected
        for start, length, _ in line_positions(file):
            assert parse_json(file.read_bytes()[start : start + length]) in texts


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r\n"])
def test_a_file_without_text_has_no_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    assert list(read_lines(tmp_path / "rows.jsonl")) == []


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ('{"a": 1}'.encode("utf-16"), "UTF-16"),
        ('{"a": 1}'.encode("utf-16-be"), "no UTF-8"),
        ('{"a": 1}'.encode("utf-32"), "UTF-16"),
        (gzip.compress(b'{"a": 1}', mtime=0), "gzip"),
        (b"\x28\xb5\x2f\xfd\x04", "zstd"),
        (bz2.compress(b'{"a": 1}'), "bzip2"),
        (lzma.compress(b'{"a": 1}'), "xz"),
        (b"PK\x03\x04rows.jsonl", "ZIP"),
        (b"PAR1 and more", "Parquet"),
    ],
)
def test_another_encoding_is_refused_by_name(tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=f"rows.jsonl is .*{what}"):
        list(read_lines(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize(
    ("text", "value"),
    [("NaN", None), ('{"a": NaN}', {"a": None}), ("-Infinity", -math.inf), ("1" + "0" * 30, 10**30)],
)
def test_nan_is_null(text: str, value: Any) -> None:
    assert parse_json(text.encode()) == value


@pytest.mark.parametrize(
    "number", ["7.50", "1e3", "-0", "0.10", "12345678901234567890123", "1e400", "Infinity", "-Infinity"]
)
def test_numbers_keep_their_spelling(number: str) -> None:
    assert str(parse_json(number.encode())) == number


@pytest.mark.parametrize(
    "text",
    [b"{", b'{"a": 1, "a": 2}', b'[{"b": {"a": 1, "a": 1}}]', b"[" * 100_000, b'"\xff"', b'"\\ud800"', b"9" * 5000]
)  # fmt: skip
def test_what_is_no_json_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"a": "é"}'.encode("latin-1"), "byte 0xe9 at position 7 is no UTF-8: convert the file"),
        (b'\xef\xbb\xbf{"a": "\x92"}', "byte 0x92 at position 7"),
        (b'{"a": 1}\r{"a": 2}\r\n', "lines end in carriage returns alone"),
        (b'{"a": 1} {"a": 2}', "there is more than one value"),
        (b'{"a": 1},', "there is more than one value"),
        (b'{"a": [1,', "the value does not end"),
        (b"{", "the value does not end"),
    ],
)
def test_the_fault_of_a_line_is_named(text: bytes, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        parse_json(text)
