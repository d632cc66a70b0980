"""Rewards of the form of a response: format, reflection, length, cost, script, size of its images."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import BytesIO
from numbers import Real
from typing import Literal

from mobula.cluster.errors import RewardError
from mobula.rewards.contract import Outcome, RewardRequest, Score
from mobula.rewards.functions.parsing.extraction import check_number, find_boxes, given_metadata, read_json, type_name
from mobula.rewards.images import decode_image
from mobula.rewards.isolation.process import call_each
from mobula.rewards.tools import Tools

_FULL_MATCH = "mobula.rewards.functions.response_form:full_match"
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

MAYE_WORDS = (
    "re-check", "re-evaluate", "re-examine", "re-think", "recheck", "reevaluate", "reexamine", "reevaluation",
    "rethink", "check again", "think again", "try again", "verify", "wait", "yet",
)  # fmt: skip


class Reflection:
    """1 if the response has at least one of `words`, by default MAYE's (arXiv:2504.02587), else 0; the reason has the
    counts.

    With `whole_words` a word counts only between word boundaries. Otherwise it also counts inside other words, as in
    the published evaluation: "awaiting" has "wait".
    """

    def __init__(self, tools: Tools, *, words: Sequence[str] = MAYE_WORDS, whole_words: bool = True) -> None:
        if isinstance(words, str) or not words or not all(isinstance(word, str) and word for word in words):
            raise ValueError(f"words={words!r} is unfit: give a list of words, or leave it out")
        boundary = r"\b" if whole_words else ""
        longest_first = sorted(set(words), key=len, reverse=True)
        self._pattern = re.compile(f"{boundary}(?:{'|'.join(map(re.escape, longest_first))}){boundary}", re.IGNORECASE)

    def __call__(self, request: RewardRequest) -> Score:
        counts = Counter(word.lower() for word in self._pattern.findall(request.response.text))
        return Score(float(bool(counts)), ", ".join(f"{word} {count}" for word, count in sorted(counts.items())))


class Overlong:
    """The soft overlong punishment of DAPO (Yu et al. 2025, equation 13), from 0 down to -`penalty`.

    With L tokens, L_max = `max_tokens` and B = `buffer_tokens`: min(0, -penalty * (L - (L_max - B)) / B), at least
    -penalty. A truncated response of any length gets -penalty.
    """

    def __init__(self, tools: Tools, *, max_tokens: int, buffer_tokens: int, penalty: float) -> None:
        check_number("max_tokens", max_tokens, low=1)
        check_number("buffer_tokens", buffer_tokens, low=1, high=max_tokens)
        check_number("penalty", penalty, low=0)
        self._free_tokens = max_tokens - buffer_tokens
        self._buffer_tokens = buffer_tokens
        self._penalty = penalty

    def __call__(self, request: RewardRequest) -> Score:
        if request.response.is_truncated:
            return Score(-self._penalty, "cut off")
        share = (request.response.num_tokens - self._free_tokens) / self._buffer_tokens
        if share <= 0:
            return Score(0.0)
        return Score(-self._penalty * min(1.0, share), f"{request.response.num_tokens} tokens")


class Cost:
    """1 within the budget, minus the relative excess over each target, at least -1.

    value = 1 - max(0, tokens / `target_tokens` - 1) - max(0, latency / `latency_budget_ms` - 1). Tokens are counted in
    the response; the latency is `latency_ms` of the metadata. `latency_budget_ms=None` counts tokens only. The
    breakdown has both excesses.
    """

    def __init__(self, tools: Tools, *, target_tokens: int, latency_budget_ms: float | None) -> None:
        check_number("target_tokens", target_tokens, low=1)
        if latency_budget_ms is not None:
            check_number("latency_budget_ms", latency_budget_ms, low=1)
        self._target_tokens = target_tokens
        self._latency_budget_ms = latency_budget_ms

    def __call__(self, request: RewardRequest) -> Score:
        parts = {"token_excess": max(0.0, request.response.num_tokens / self._target_tokens - 1)}
        if self._latency_budget_ms is not None:
            latency_ms = given_metadata(request.metadata, "latency_ms")
            if not isinstance(latency_ms, Real) or not math.isfinite(latency_ms) or latency_ms < 0:
                raise RewardError(f"metadata.latency_ms={latency_ms!r} is no time in milliseconds")
            parts["latency_excess"] = max(0.0, float(latency_ms) / self._latency_budget_ms - 1)
        over = [name.removesuffix("_excess") for name, excess in parts.items() if excess]
        reason = f"over budget: {', '.join(over)}" if over else ""
        return Score(max(-1.0, 1 - math.fsum(parts.values())), reason, parts)


LAST_CODE_POINT = 0x10FFFF


class ScriptShare:
    """The share of characters with a code point in `code_points` [first, last]; 0 for an empty response.

    The CJK ideographs, [19968, 40959], with a weight of -0.1 are the language penalty of MAYE (arXiv:2504.02587).
    """

    def __init__(self, tools: Tools, *, code_points: Sequence[int]) -> None:
        fits = len(code_points) == 2 and all(isinstance(c, int) and not isinstance(c, bool) for c in code_points)
        if not fits or not 0 <= code_points[0] <= code_points[1] <= LAST_CODE_POINT:
            raise ValueError(
                f"code_points={list(code_points)!r} is unfit: "
                "give the first and the last code point, e.g. [19968, 40959]"
            )
        self._first, self._last = code_points

    def __call__(self, request: RewardRequest) -> Score:
        text = request.response.text
        num_inside = sum(self._first <= ord(character) <= self._last for character in text)
        return Score(num_inside / len(text) if text else 0.0)


BYTES = 1000  # of a kilobyte


class JpegSize:
    """value = -k / `scale` with `wanted: small`, k / `scale` with `large`; k is the size in kB as a JPEG of `quality`.

    Several images (frames of a video) give the mean. Needs no model and no reference, which makes it a cheap test of a
    flow model. DDPO's compressibility (arXiv:2305.13301) uses quality 95; Flow-GRPO also divides by 500.
    """

    def __init__(self, tools: Tools, *, wanted: Literal["small", "large"], quality: int, scale: float) -> None:
        if wanted not in ("small", "large"):
            raise ValueError(f"wanted={wanted!r} is unknown: use small or large")
        if isinstance(quality, bool) or not isinstance(quality, int) or not 1 <= quality <= 95:
            raise ValueError(f"quality={quality!r} is unfit: give a whole number from 1 to 95")
        check_number("scale", scale, low=0)
        if scale == 0:
            raise ValueError("scale=0 divides by nothing: give a number above 0")
        self._per_kilobyte = (1 if wanted == "large" else -1) / scale
        self._quality = quality

    def __call__(self, request: RewardRequest) -> Score:
        images = request.response.images
        if not images:
            raise RewardError("the response has no image to compress")
        sizes = [self._size(image, f"image {n + 1} of the response") for n, image in enumerate(images)]
        kilobytes = sum(sizes) / len(sizes)
        return Score(self._per_kilobyte * kilobytes, f"{kilobytes:.1f} kB as JPEG")

    def _size(self, image: bytes, what: str) -> float:
        file = BytesIO()
        decode_image(image, what).save(file, "JPEG", quality=self._quality)
        return file.tell() / BYTES
