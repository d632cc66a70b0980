"""Format: 1 if the response has the required format, else 0, for any content."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from mobula.rewards.contract import Outcome, RewardRequest, Score
from mobula.rewards.functions.parsing.latex_boxes import find_boxes
from mobula.rewards.functions.parsing.strict_json import read_json, type_name
from mobula.rewards.isolation.process_pool import call_each
from mobula.rewards.tools import Tools

_FULL_MATCH = "mobula.rewards.functions.format:full_match"
_TAG_NAME = re.compile(r"[A-Za-z][\w-]*")
_TAG = re.compile(rf"<({_TAG_NAME.pattern})>")
THINK_ANSWER = ("think", "answer")

Flaw = Callable[[str], str]  # response -> its format error, or ""


class Format:
    """Checks a response against one format, which exactly one option selects.

    If the prompt already opens a tag of the format, such as `<think>` of a reasoning model, the tag counts as part of
    the response.

    `preset="boxed"`: exactly one balanced, non-empty `\\boxed{...}` with nothing but white space after it.
    `preset="think_answer"`: `<think>...</think><answer>...</answer>`, each tag once, no other text.
    `preset="json"`: one strict JSON object; `preset="fenced_json"`: the same, or text with one code block of it.
    `tags=[a, b]`: like `think_answer` with these tags in this order; the last element is not blank.
    `json_fields=[a, b]`: one strict JSON object with exactly these fields, none null, blank or empty.
    `pattern`: the whole response matches it (DOTALL). Runs in an isolated process: backtracking cannot be interrupted.
    """

    def __init__(
        self,
        tools: Tools,
        *,
        preset: str | None = None,
        pattern: str | None = None,
        tags: Sequence[str] | None = None,
        json_fields: Sequence[str] | None = None,
    ) -> None:
        options = {"preset": preset, "pattern": pattern, "tags": tags, "json_fields": json_fields}
        given = {name: value for name, value in options.items() if value is not None}
        if len(given) != 1:
            raise ValueError(f"{', '.join(f'{n}={v!r}' for n, v in options.items())}: set exactly one of these")
        if pattern is not None:
            full_match(pattern, "")  # refuses an invalid pattern before the first response
        self._isolated = tools.isolated
        self._pattern = pattern
        # The tags of the format, which the prompt may have opened.
        own_tags = THINK_ANSWER if preset == "think_answer" else tags or ()
        self._tags = frozenset(own_tags if pattern is None else _TAG.findall(pattern))
        self._flaw = None if pattern is not None else _shape(preset, tags, json_fields)

    def __call__(self, request: RewardRequest) -> Score:
        if self._flaw is not None:
            flaw = self._flaw(request.text_with(self._tags))
            return Score(float(not flaw), flaw)
        return _matched(self._isolated.call(_FULL_MATCH, self._pattern, request.text_with(self._tags)))

    def score_batch(self, requests: Sequence[RewardRequest]) -> list[Outcome]:
        """Matches patterns concurrently; a response on which the pattern hangs costs only its own timeout."""
        if self._flaw is not None:
            return [self(request) for request in requests]
        calls = [(self._pattern, request.text_with(self._tags)) for request in requests]
        return call_each(self._isolated, _FULL_MATCH, calls, _matched)


def full_match(pattern: str, text: str) -> bool:
    """Whether the whole text matches. Raises `ValueError` with the position for an invalid pattern."""
    try:
        return re.fullmatch(pattern, text, re.DOTALL) is not None
    except (re.error, TypeError) as error:
        raise ValueError(f"pattern={pattern!r} is no regular expression: {error}") from error


def boxed_flaw(text: str) -> str:
    r"""Returns why a text does not end in a single `\boxed{...}`, or ""."""
    boxes, num_unclosed = find_boxes(text)
    if len(boxes) + num_unclosed != 1:
        return f"{len(boxes) + num_unclosed} \\boxed{{}} instead of one"
    if num_unclosed:
        return "\\boxed{ is never closed"
    if not boxes[0].content(text).strip():
        return "\\boxed{} is empty"
    return "text after \\boxed{}" if text[boxes[0].end :].strip() else ""


def tags_flaw(tags: Sequence[str], text: str) -> str:
    """Returns why a text does not consist of these elements in this order, the last not blank, or ""."""
    rest = text
    for tag in tags:
        for mark in (f"<{tag}>", f"</{tag}>"):
            if (count := text.count(mark)) != 1:
                return f"{count} times {mark} instead of once"
            before, _, rest = rest.partition(mark)
            if mark.startswith("</"):
                content = before
            elif before.strip():
                return "text around the tags, or tags out of order"
    if rest.strip():
        return "text around the tags, or tags out of order"
    return "" if content.strip() else f"<{tags[-1]}> is empty"


def json_flaw(fields: Sequence[str] | None, text: str, *, fenced: bool) -> str:
    """Returns why a text is not a JSON object with exactly these fields (None: any), or ""."""
    value, flaw = read_json(text, fenced=fenced)
    if flaw:
        return flaw
    if not isinstance(value, dict):
        return f"not a JSON object: {type_name(value)}"
    if fields is None:
        return ""
    if value.keys() != set(fields):
        return f"other fields than {', '.join(fields)}"
    empty = [name for name in fields if _is_empty(value[name])]
    return f"field {empty[0]!r} is empty" if empty else ""


def _is_empty(value: object) -> bool:
    return value is None or value == [] or value == {} or (isinstance(value, str) and not value.strip())


def _matched(matches: bool) -> Score:
    return Score(float(matches), "" if matches else "does not match the pattern")


def _shape(preset: str | None, tags: Sequence[str] | None, json_fields: Sequence[str] | None) -> Flaw:
    if preset is not None:
        if preset not in PRESETS:
            raise ValueError(f"preset={preset!r} is unknown: use one of {', '.join(PRESETS)}, or another option")
        return PRESETS[preset]
    names = tags if tags is not None else json_fields
    is_list = isinstance(names, Sequence) and not isinstance(names, str) and all(isinstance(n, str) for n in names)
    if not is_list or not names or len(set(names)) != len(names):
        option = "json_fields" if tags is None else "tags"
        raise ValueError(f"{option}={names!r} is unfit: give a list of different names")
    if tags is None:
        return partial(json_flaw, tuple(names), fenced=False)
    if not all(map(_TAG_NAME.fullmatch, names)):
        raise ValueError(f"tags={list(names)!r} are unfit: give names alone, such as think, without brackets")
    return partial(tags_flaw, tuple(names))


PRESETS: Mapping[str, Flaw] = {
    "boxed": boxed_flaw,
    "think_answer": partial(tags_flaw, THINK_ANSWER),
    "json": partial(json_flaw, None, fenced=False),
    "fenced_json": partial(json_flaw, None, fenced=True),
}
