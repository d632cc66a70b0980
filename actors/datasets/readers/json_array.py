"""JSON files: one array of objects, as LLaMA-Factory and LightRFT write, or one object a line."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from pathlib import Path

from mobula.actors.datasets.readers.base import SUFFIXES, Opened, Table, files_of
from mobula.actors.datasets.readers.json_records import FileSpans, JsonTable
from mobula.actors.datasets.readers.jsonl import lines_table
from mobula.cluster.errors import DatasetError

# A text, or a character that gives JSON its structure. Possessive: no backtracking in texts of any length.
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
    """Start, length and number, from 1, of every element of the array, found without reading it into memory.

    Raises:
        DatasetError: the array does not end, or something follows it.
    """
    with file.open("rb") as content, mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ) as text:
        depth, start, number = 0, 0, 0
        for token in TOKEN.finditer(text):
            found = token[0]
            if found in OPENING:
                depth += 1
                if depth == 1:
                    start = token.end()
            elif depth == 1 and found in (b",", b"]"):
                if text[start : token.start()].strip():
                    number += 1
                    yield start, token.start() - start, number
                start = token.end()
                depth -= found == b"]"
            elif found in CLOSING:
                depth -= 1
            if depth == 0:
                if ANYTHING.search(text, token.end()):
                    raise DatasetError(f"{file} goes on behind its array: write one array, or one object a line")
                return
    raise DatasetError(f"{file} is an array that does not end: write it again, or one object a line")
