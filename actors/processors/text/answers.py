"""AnswerLayout: where an answer stands in rendered text, and what the chat template writes around it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mobula.cluster.errors import PromptError

Turns = Sequence[tuple[str, str]]
"""(role, text) of each turn."""

THOUGHT = "<think>"


@dataclass(frozen=True)
class PlacedAnswer:
    """An answer as a policy writes it, and the text around it."""

    head: str  # behind the answer before it, or all text before the first one
    opened: str  # the start of the head that a generation prompt has as well
    text: str
    tail: str


class AnswerLayout:
    """Finds answers by rendering a conversation with a mark in the place of an answer, and with the answer.

    The text before an answer, such as an empty thought, and behind it is the template's. White space alone before an
    answer is written by the policy, because a tokenizer joins it to the first word. An answer that the template
    changes, such as one whose thought it drops, stands behind the generation prompt, as the policy writes it.
    """

    def __init__(self, render: Callable[[Turns, bool], str], mark: str, num_context: int) -> None:
        """`render(turns, is_open)` applies the template. `mark` is a text that occurs in no turn. Answers behind the
        first `num_context` turns are those of the policy.
        """
        self._render = render
        self._mark = mark
        self._num_context = num_context

    def placed(self, turns: Turns, answer: str) -> PlacedAnswer:
        """The answer to `turns`.

        Raises:
            PromptError: the template drops answers, or changes the turns before one.
        """
        before = self._marked(turns)
        opened = self._render(before, True)
        template_head, tail = self._around_mark(self._render([*before, ("assistant", self._mark)], False))
        rendered = self._render([*before, ("assistant", answer)], False)
        _refuse_changed(self._question(before), rendered)
        if places := [n for n, (_, text) in enumerate(before) if text == self._mark]:
            _refuse_changed(self._question(before[: places[-1]]), opened)
        text = rendered.removesuffix(tail)
        start = _start_of(answer, text) if rendered.endswith(tail) else None
        shared = len(os.path.commonprefix([opened, template_head]))
        if start is None or _has_second_thought(answer, text[shared:start]):
            return self._behind_mark(opened, opened, _behind(opened, answer), tail)
        if text.startswith(opened) and not text[len(opened) : start].strip():
            start = len(opened)  # also where the answer's first words are those of the generation prompt
        return self._behind_mark(text[:start], os.path.commonprefix([opened, text[:start]]), text[start:], tail)

    def _behind_mark(self, head: str, opened: str, text: str, tail: str) -> PlacedAnswer:
        return PlacedAnswer(head.rpartition(self._mark)[2], opened.rpartition(self._mark)[2], text, tail)

    def _marked(self, turns: Turns) -> list[tuple[str, str]]:
        """`turns` with marks in the place of answers, so that their texts change nothing behind them."""
        return [
            (role, self._mark if role == "assistant" and n >= self._num_context else text)
            for n, (role, text) in enumerate(turns)
        ]

    def _question(self, turns: Turns) -> str:
        """The text of `turns` without what the template adds at the end of a conversation."""
        return os.path.commonprefix([self._render(turns, False), self._render(turns, True)])

    def _around_mark(self, rendered: str) -> tuple[str, str]:
        head, mark, tail = rendered.rpartition(self._mark)
        if not mark:
            raise PromptError(
                f"the chat template of policy.model drops answers of the assistant, as in {rendered[-80:]!r}: use "
                "another template, or another checkpoint"
            )
        return head, tail


def unused_mark(texts: Sequence[str]) -> str:
    """A short text that occurs in none of `texts`."""
    number = 0
    while any(f"mark{number}x" in text for text in texts):
        number += 1
    return f"mark{number}x"


def _refuse_changed(question: str, rendered: str) -> None:
    if not rendered.startswith(question):
        raise PromptError(
            "the chat template of policy.model changes earlier turns when later ones follow, so these are not the "
            "tokens that were answered: split the row into one for each answer, or use another template"
        )


def _start_of(answer: str, rendered: str) -> int | None:
    """Index in `rendered` at which the answer begins that it ends with; None if the template has changed more of it
    than white space.
    """
    for written in (answer, answer.rstrip(), answer.strip()):
        if rendered.endswith(written):
            return len(rendered) - len(written)
    wanted = "".join(answer.split())
    places = [place for place, character in enumerate(rendered) if not character.isspace()]
    if not wanted or len(wanted) > len(places):
        return None
    start = places[-len(wanted)]
    return start if "".join(rendered[start:].split()) == wanted else None


def _has_second_thought(answer: str, written: str) -> bool:
    """Whether the template opens a thought before an answer that has its own."""
    return answer.lstrip().startswith(THOUGHT) and "</think>" in written


def _behind(opened: str, answer: str) -> str:
    """The answer behind a generation prompt that may open its thought already."""
    if opened.rstrip().endswith(THOUGHT) and answer.lstrip().startswith(THOUGHT):
        return re.sub(rf"^\s*{THOUGHT}\s*", "", answer)
    return answer
