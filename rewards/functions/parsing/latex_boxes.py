r"""Finds the `\boxed{...}` expressions of a response, nested braces included, in one pass over the text."""

from __future__ import annotations

import re
from dataclasses import dataclass

# An escaped brace or backslash is a plain character and opens nothing. A number or letter may have no braces.
_TOKENS = re.compile(r"\\boxed\s*\{|\\boxed(?:\s+[A-Za-z]\b|\s*-?[0-9]+(?:\.[0-9]+)?)|\\.|[{}]", re.DOTALL)
_BETWEEN_BOXES = re.compile(r"[\s$]*(?:[,;]\s*)?(?:\\text\s*\{\s*)?(and|or|[,;])?[\s}$]*")


@dataclass(frozen=True)
class BoxedSpan:
    r"""Position of one balanced `\boxed{content}`. Stores no copy of the content, because boxes nest."""

    start: int  # of the backslash
    content_start: int
    content_end: int
    end: int  # after the closing brace

    def content(self, text: str) -> str:
        return text[self.content_start : self.content_end]


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
        elif token[0].startswith("\\boxed") and token[0][-1] != "{":
            boxes.append(BoxedSpan(token.start(), token.start() + len("\\boxed"), token.end(), token.end()))
        elif token[0].startswith("\\boxed"):
            open_braces.append(token)
        elif token[0] == "}" and open_braces:
            opening = open_braces.pop()
            if opening is not None:
                boxes.append(BoxedSpan(opening.start(), opening.end(), token.start(), token.end()))
    boxes.sort(key=lambda box: box.start)
    return boxes, sum(opening is not None for opening in open_braces)


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the balanced `\boxed{...}` that opens last, or None."""
    boxes, _ = find_boxes(text)
    return boxes[-1].content(text) if boxes else None


def closing_boxes(text: str) -> str | None:
    r"""Returns the content of the last box, or of the last boxes as a list: `\boxed{2}, \boxed{3}` is `2 , 3`."""
    boxes, _ = find_boxes(text)
    if not boxes:
        return None
    content = boxes[-1].content(text)
    for box, following in zip(boxes[-2::-1], boxes[:0:-1], strict=False):
        between = _BETWEEN_BOXES.fullmatch(text, box.end, following.start) if box.end <= following.start else None
        if between is None or not (between[1] or re.search("[,;]", between[0])):
            break
        content = f"{box.content(text)} {between[1] or ','} {content}"
    return content
