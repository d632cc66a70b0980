"""Reads what a rule compares: the answer in a response (tags, JSON, lines, boxes), references, metadata and options."""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from mobula.cluster.errors import RewardError
from mobula.cluster.records.markup import marked_answer
from mobula.rewards.contract import RewardRequest, Score

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


class _NotStrictError(ValueError):
    """Python's parser would accept the text, the standard (RFC 8259) does not."""


def read_json(text: str, *, fenced: bool) -> tuple[Any, str]:
    r"""Returns (value, ""), or (None, reason).

    Numbers are returned as text, so `1.10`, `1e999` and 5,000 digits are unchanged. NaN, infinities and repeated names
    in an object are refused. With `fenced`, the text may have one fenced code block; then only the block is read.
    """
    if fenced and "```" in text:
        if text.count("```") != 2:
            return None, f"{text.count('```')} code fences instead of a pair"
        label, _, text = text.split("```")[1].partition("\n")
        if label.strip() not in ("", "json"):
            return None, "a code block of another kind than JSON"
    try:
        return _DECODER.decode(text), ""
    except _NotStrictError as error:
        return None, f"not strict JSON: {error}"
    except ValueError as error:
        return None, f"not JSON: {error.args[0] if error.args else error}"
    except RecursionError:
        return None, "not JSON that can be read: nested too deep"


def field_text(value: Any, name: str) -> tuple[str, str]:
    """Returns (text or number of a field as written, ""), or ("", reason)."""
    if not isinstance(value, dict):
        return "", f"not a JSON object: {type_name(value)}"
    if name not in value:
        return "", f"no field {name!r}"
    field = value[name]
    if isinstance(field, bool):
        return str(field).lower(), ""
    return (field, "") if isinstance(field, str) else ("", f"field {name!r} is {type_name(field)}")


def type_name(value: Any) -> str:
    """Returns the JSON name for the type of a value from `read_json`."""
    names = {dict: "an object", list: "an array", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a text or number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise _NotStrictError("a name comes twice")
    return members


def _refuse_constant(name: str) -> Any:
    raise _NotStrictError(f"{name} is no number")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_int=str, parse_float=str, parse_constant=_refuse_constant)
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
    """
    way, colon, name = extract.partition(":") if isinstance(extract, str) else ("", "", "")
    if way in _PLAIN and not colon:
        return _not_empty(_PLAIN[way])
    if way in _NAMED and name:
        return _not_empty(_NAMED[way](name))
    raise ValueError(f"extract={extract!r} is no way to find the answer: use {WAYS}")


def request_extractor(extract: str) -> Callable[[RewardRequest], tuple[str, str]]:
    """As `extractor`, of a request: for `tags:NAME` a tag that the prompt has opened counts."""
    find = extractor(extract)
    tags = [extract.removeprefix("tags:")] if extract.startswith("tags:") else []
    return lambda request: find(request.text_with(tags))


class AnswerRule(ABC):
    """A rule that compares the answer with the references; a response without an answer scores 0."""

    def __init__(self, extract: str) -> None:
        self._extract = request_extractor(extract)

    def __call__(self, request: RewardRequest) -> Score:
        references = given_references(request.references)
        answer, flaw = self._extract(request)
        return Score(0.0, flaw) if flaw else self._compared(answer, references)

    @abstractmethod
    def _compared(self, answer: str, references: tuple[str, ...]) -> Score: ...


def _not_empty(find: Extractor) -> Extractor:
    def extract(text: str) -> tuple[str, str]:
        answer, flaw = find(text)
        answer = answer.strip()
        return answer, flaw or ("" if answer else "empty answer")

    return extract


def _last_number(text: str) -> tuple[str, str]:
    numbers = _NUMBER.findall(text)
    return (numbers[-1], "") if numbers else ("", "no number")


def _boxed(text: str) -> tuple[str, str]:
    boxes, _ = find_boxes(text)
    return (boxes[-1].content(text), "") if boxes else ("", "no \\boxed{} answer")


def _between_tags(text: str, opening: str, closing: str) -> tuple[str, str]:
    for tag in (opening, closing):
        if (count := text.count(tag)) != 1:
            return "", f"{count} times {tag} instead of once"
    start, end = text.index(opening) + len(opening), text.index(closing)
    return (text[start:end], "") if start <= end else ("", f"{closing} before {opening}")


def _json_field(text: str, name: str, *, fenced: bool) -> tuple[str, str]:
    value, flaw = read_json(text, fenced=fenced)
    return ("", flaw) if flaw else field_text(value, name)


_PLAIN: Mapping[str, Extractor] = {
    "whole": lambda text: (text, ""),
    "last_line": lambda text: (text.rstrip().rpartition("\n")[2], ""),
    "last_number": _last_number,
    "boxed": _boxed,
}

_NAMED: Mapping[str, Callable[[str], Extractor]] = {
    "json": lambda name: partial(_json_field, name=name, fenced=False),
    "fenced_json": lambda name: partial(_json_field, name=name, fenced=True),
    "tags": lambda name: partial(_between_tags, opening=f"<{name}>", closing=f"</{name}>"),
}


def given_references(references: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the references that are not blank, in order; of a worked answer that ends in `#### 24`, as in gsm8k, the
    24. Raises: RewardError: all are blank."""
    given = tuple(marked_answer(reference)[1] for reference in references if reference.strip())
    if not given:
        raise RewardError("the prompt has no reference answer to compare with")
    return given


def given_metadata(metadata: Mapping[str, Any], key: str) -> Any:
    """Returns the value of a key in the prompt's metadata. Raises: RewardError: the key is missing or null."""
    if metadata.get(key) is None:
        raise RewardError(f"the prompt's metadata has no {key!r}: it has {', '.join(map(repr, metadata)) or 'nothing'}")
    return metadata[key]


def check_true_or_false(**options: object) -> None:
    """Refuses options that are not bool, because the text "false" is truthy."""
    for option, value in options.items():
        if not isinstance(value, bool):
            raise ValueError(f"{option}={value!r} is neither true nor false")


def check_number(option: str, value: object, *, low: float, high: float = math.inf) -> None:
    """Refuses an option that is not a finite number from `low` to `high`."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high or math.isinf(value):
        reach = f"from {low:g} to {high:g}" if math.isfinite(high) else f"of {low:g} or more"
        raise ValueError(f"{option}={value!r} is unfit: give a number {reach}")
