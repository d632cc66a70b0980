"""Extracts the answer of a response: a box, a JSON field, tags, the last line, the last number, or the whole text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mobula.rewards.contract import RewardRequest
from mobula.rewards.functions.parsing.latex_boxes import find_boxes
from mobula.rewards.functions.parsing.strict_json import field_text, read_json

Extractor = Callable[[str], tuple[str, str]]  # response -> (answer, ""), or ("", reason) without an answer

_NUMBER = re.compile(r"(?:(?<![\w)])-)?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")

WAYS = "whole, last_line, last_number, boxed, json:FIELD, fenced_json:FIELD or tags:NAME"


def extractor(extract: str) -> Extractor:
    r"""Returns the extractor of an option `extract`. Answers are stripped and not empty.

    `whole`: the response. `last_line`: the last line that is not blank. `last_number`: the last decimal number, with
    minus sign and without unit; of a fraction the denominator. `boxed`: the balanced `\boxed{...}` that opens last.
    `tags:NAME`: the text between the only `<NAME>` and the only `</NAME>`. `json:FIELD`: a text or number in this field
    of a response that is one strict JSON object; `fenced_json:FIELD`: the same, or inside the response's only fenced
    code block.

    Raises:
        ValueError: the option is unknown.
    """
    way, colon, name = extract.partition(":") if isinstance(extract, str) else ("", "", "")
    if way in _PLAIN and not colon:
        return _not_empty(_PLAIN[way])
    if way in _NAMED and name:
        return _not_empty(_NAMED[way](name))
    raise ValueError(f"extract={extract!r} is no way to find the answer: use {WAYS}")


@dataclass(frozen=True)
class RequestExtractor:
    """Extracts the answer of a request by `extract`. For `tags:NAME` a tag opened by the prompt counts."""

    extract: str

    def __post_init__(self) -> None:
        extractor(self.extract)  # refuses an unknown method

    def __call__(self, request: RewardRequest) -> tuple[str, str]:
        tags = [self.extract.removeprefix("tags:")] if self.extract.startswith("tags:") else []
        return extractor(self.extract)(request.text_with(tags))


def _not_empty(find: Extractor) -> Extractor:
    def extract(text: str) -> tuple[str, str]:
        answer, flaw = find(text)
        answer = answer.strip()
        return answer, flaw or ("" if answer else "empty answer")

    return extract


def _last_line(text: str) -> tuple[str, str]:
    return text.rstrip().rpartition("\n")[2], ""


def _last_number(text: str) -> tuple[str, str]:
    numbers = _NUMBER.findall(text)
    return (numbers[-1], "") if numbers else ("", "no number")


def _boxed(text: str) -> tuple[str, str]:
    boxes, _ = find_boxes(text)
    return (boxes[-1].content(text), "") if boxes else ("", "no \\boxed{} answer")


def _between_tags(name: str) -> Extractor:
    opening, closing = f"<{name}>", f"</{name}>"

    def find(text: str) -> tuple[str, str]:
        for tag in (opening, closing):
            if (count := text.count(tag)) != 1:
                return "", f"{count} times {tag} instead of once"
        start, end = text.index(opening) + len(opening), text.index(closing)
        return (text[start:end], "") if start <= end else ("", f"{closing} before {opening}")

    return find


def _json_field(name: str, *, fenced: bool) -> Extractor:
    def find(text: str) -> tuple[str, str]:
        value, flaw = read_json(text, fenced=fenced)
        return ("", flaw) if flaw else field_text(value, name)

    return find


_PLAIN: Mapping[str, Extractor] = {
    "whole": lambda text: (text, ""),
    "last_line": _last_line,
    "last_number": _last_number,
    "boxed": _boxed,
}
_NAMED: Mapping[str, Callable[[str], Extractor]] = {
    "json": lambda name: _json_field(name, fenced=False),
    "fenced_json": lambda name: _json_field(name, fenced=True),
    "tags": _between_tags,
}
