"""Format: 1 if the response has the asked-for shape, else 0, whatever it says."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from rewards.contract import RewardRequest, Score
from rewards.functions.boxed import find_boxes
from rewards.tools import Tools

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_THINK_ANSWER = re.compile(r"\s*<think>(.*)</think>\s*<answer>(.*)</answer>\s*", re.DOTALL)
_FULL_MATCH = "rewards.functions.format:full_match"


class Format:
    """Holds a response against one preset or one regular expression.

    `preset="boxed"`: exactly one balanced, non-empty `\\boxed{...}` with nothing but white space after it.
    `preset="think_answer"`: `<think>...</think><answer>...</answer>`, each tag once, nothing around them.
    `pattern`: the whole response matches it (DOTALL); it runs isolated, since backtracking cannot be interrupted.
    """

    def __init__(self, tools: Tools, *, preset: str | None = None, pattern: str | None = None) -> None:
        if (preset is None) == (pattern is None):
            raise ValueError(f"preset={preset!r} and pattern={pattern!r}: set exactly one of the two")
        if pattern is not None:
            full_match(pattern, "")  # a broken pattern is refused here, not at the first response
        elif preset not in PRESETS:
            raise ValueError(f"preset={preset!r} is unknown: use one of {', '.join(PRESETS)}, or pattern")
        self._isolated = tools.isolated
        self._preset = preset
        self._pattern = pattern

    def __call__(self, request: RewardRequest) -> Score:
        if self._pattern is None:
            flaw = PRESETS[self._preset](request.response.text)
        else:
            matches = self._isolated.call(_FULL_MATCH, self._pattern, request.response.text)
            flaw = "" if matches else "does not match the pattern"
        return Score(float(not flaw), flaw)


def full_match(pattern: str, text: str) -> bool:
    """Whether the whole text matches; a pattern that does not compile is a `ValueError` with its position."""
    try:
        return re.fullmatch(pattern, text, re.DOTALL) is not None
    except re.error as error:
        raise ValueError(f"pattern={pattern!r} is no regular expression: {error}") from error


def boxed_flaw(text: str) -> str:
    r"""What keeps a text from ending in its only `\boxed{...}`, or ""."""
    boxes, num_unclosed = find_boxes(text)
    if len(boxes) + num_unclosed != 1:
        return f"{len(boxes) + num_unclosed} \\boxed{{}} instead of one"
    if num_unclosed:
        return "\\boxed{ is never closed"
    if not boxes[0].content(text).strip():
        return "\\boxed{} is empty"
    return "text after \\boxed{}" if text[boxes[0].end :].strip() else ""


def think_answer_flaw(text: str) -> str:
    """What keeps a text from being one thought and one answer, or ""."""
    for tag in _TAGS:
        if text.count(tag) != 1:
            return f"{text.count(tag)} times {tag} instead of once"
    match = _THINK_ANSWER.fullmatch(text)
    if match is None:
        return "text around the tags, or tags out of order"
    return "" if match[2].strip() else "<answer> is empty"


PRESETS: Mapping[str, Callable[[str], str]] = {"boxed": boxed_flaw, "think_answer": think_answer_flaw}
