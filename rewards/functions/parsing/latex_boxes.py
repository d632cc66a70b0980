r"""Finds the `\boxed{...}` expressions of a response, nested braces included, in one pass over the text."""

from __future__ import annotations

import re
from dataclasses import dataclass

# An escaped brace or backslash is a plain character and opens nothing.
_TOKENS = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)


@dataclass(frozen=True)
class BoxedSpan:
    r"""Position of one balanced `\boxed{content}`. Stores no copy of the content, because boxes nest."""

    start: int  # of the backslash
    content_start: int
    end: int  # after the closing brace

    def content(self, text: str) -> str:
        return text[self.content_start : self.end - 1]


def find_boxes(text: str) -> tuple[list[BoxedSpan], int]:
    r"""Returns all balanced boxes in the order of their openings, and the number of `\boxed{` without an end."""
    boxes: list[BoxedSpan] = []
    if (start := text.find("\\boxed")) < 0:
        return boxes, 0
    open_braces: list[re.Match[str] | None] = []  # a box's opening match, or None for a plain brace
    while start and text[start - 1] == "\\":  # never start inside an escape like the `\\` of `\\boxed`
        start -= 1
    for token in _TOKENS.finditer(text, start):
        if token[0] == "{":
            open_braces.append(None)
        elif token[0].startswith("\\boxed"):
            open_braces.append(token)
        elif token[0] == "}" and open_braces:
            opening = open_braces.pop()
            if opening is not None:
                boxes.append(BoxedSpan(opening.start(), opening.end(), token.end()))
    boxes.sort(key=lambda box: box.start)
    return boxes, sum(opening is not None for opening in open_braces)


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the balanced `\boxed{...}` that opens last, or None."""
    boxes, _ = find_boxes(text)
    return boxes[-1].content(text) if boxes else None
