"""Formats the text of an error as one line, for tables and logs."""

from __future__ import annotations

import re

COLOUR = re.compile(r"\x1b\[[0-9;]*m")

MAX_DETAIL = 120  # characters of each line that is shown of an error of several lines

MAX_LINE = 400  # characters of an error of one line


def in_one_line(error: Exception) -> str:
    """Returns the text of an error, shortened for a table; of several lines the first and the last."""
    lines = [line.strip() for line in COLOUR.sub("", str(error)).strip().splitlines()]
    if len(lines) < 2:
        return _cut("".join(lines), MAX_LINE)
    return " ... ".join(_cut(line, MAX_DETAIL) for line in (lines[0], lines[-1]))


def _cut(line: str, length: int) -> str:
    return line if len(line) <= length else f"{line[: length - 3].rstrip()}..."
