"""Formats text of errors and of runs for terminals, tables and logs."""

from __future__ import annotations

import re

COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # of libraries: colours, and moves of the cursor
# C0 and C1 without tab and line feed, and characters that change the direction of a line.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")

MAX_DETAIL = 120  # characters of each line that is shown of an error of several lines

MAX_LINE = 400  # characters of an error of one line


def in_one_line(error: Exception) -> str:
    """Returns the text of an error, shortened for a table; of several lines the first and the last."""
    lines = [line.strip() for line in COLOUR.sub("", str(error)).strip().splitlines()]
    if len(lines) < 2:
        return _cut("".join(lines), MAX_LINE)
    return " ... ".join(_cut(line, MAX_DETAIL) for line in (lines[0], lines[-1]))


def escaped(text: str) -> str:
    """Returns the text with every control character as `\\u001b`, which is valid in JSON as well."""
    return CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _cut(line: str, length: int) -> str:
    return line if len(line) <= length else f"{line[: length - 3].rstrip()}..."
