"""Blocks, tables and cells of generated pages."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path

MAX_CELL = 158  # characters of a table cell, without the space on each side
MORE = " (more below)"
SENTENCE_END = re.compile(r"(?<=\.)(?<!e\.g\.)(?<!i\.e\.)(?<!Dr\.) +")


def with_block(page: str, begin: str, end: str, block: str) -> str:
    """Replaces the block between the lines `begin` and `end` of a page by `block`, which includes both lines.

    Raises:
        ValueError: the page has no such block, or several.
    """
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"the page needs one line {begin!r} and behind it one line {end!r}: add them")
    head, _, rest = page.partition(begin)
    return head + block + rest.partition(end)[2]


def write_page(target: Path, page: str) -> None:
    """Writes a generated page and logs the path."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    target.write_text(page, encoding="utf-8")
    logging.info("wrote %s", target)


def row(cells: Iterable[str]) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |"


def chunks(entries: Iterable[str], separator: str = ", ") -> list[str]:
    """Joins entries into as few cells as hold them; one empty cell without entries."""
    cells = [""]
    for entry in entries:
        joined = f"{cells[-1]}{separator}{entry}" if cells[-1] else entry
        if len(joined) <= MAX_CELL:
            cells[-1] = joined
        else:
            cells.append(entry)
    return cells


def rows(*columns: list[str]) -> Iterator[str]:
    """Rows of columns of cells; columns with fewer cells than others end with empty ones."""
    return (row(cells) for cells in zip_longest(*columns, fillvalue=""))


def shortened(text: str) -> tuple[str, str]:
    """The first sentences of a text, as many as a cell holds, and the rest, which is empty if all of it fits.

    If the first sentence is too long, the cell has its first clauses, and the rest is the whole text.
    """
    if len(text) <= MAX_CELL:
        return text, ""
    head, rest = _leading(SENTENCE_END.split(text))
    if head:
        return f"{head}{MORE}", " ".join(rest)
    clauses, _ = _leading(re.split(r"(?<=[;:]) +", text))
    return f"{clauses.rstrip(';:')}{MORE}".strip(), text


def _leading(parts: list[str]) -> tuple[str, list[str]]:
    """The first parts that fit into a cell with `MORE`, joined, and the others."""
    head, others = "", list(parts)
    while others and len(head) + len(others[0]) + 1 <= MAX_CELL - len(MORE):
        head = f"{head} {others.pop(0)}".strip()
    return head, others
