"""Reads lists of prompts: text files with one prompt a line, or JSONL files."""

from __future__ import annotations

from mobula.actors.datasets.readers.base import SUFFIXES, Opened, Record, Table, files_of
from mobula.actors.datasets.readers.json_files import JsonTable, line_spans, lines_table
from mobula.actors.datasets.rows import RowError

TEXT = ".txt"


def open_prompts(opened: Opened) -> Table:
    """Opens the JSONL files of a split; without any, the text files."""
    files = files_of(opened, SUFFIXES["prompts"])
    if files[0].suffix != TEXT:
        return lines_table(opened.path, files)
    return TextTable(opened.path, [line_spans(file) for file in files], "line")


class TextTable(JsonTable):
    """Lines of text as records with one column, `prompt`."""

    def parsed(self, text: bytes) -> Record:
        try:
            return {"prompt": text.decode("utf-8-sig").strip()}
        except UnicodeDecodeError as error:
            raise RowError("broken_text", f"the line is not UTF-8 ({error}): convert the file") from error
