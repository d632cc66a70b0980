"""AnswerLayout: separates answers from the chat template's text around them."""

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
    """An answer as a policy writes it, and the template's text around it."""

    head: str  # text since the previous answer
    opened: str  # the part of the head that a generation prompt has as well
    text: str
    tail: str


class AnswerLayout:
    """Locates answers: renders a conversation twice, with the answer and with a mark instead of the answer.

    Text before an answer (such as an empty thought) and behind it belongs to the template. White space directly before
    an answer belongs to the policy, because a tokenizer joins it to the first word. If the template changes an answer
    (such as dropping the thought), the unchanged answer follows the generation prompt.

    Rendered texts are kept: the answers of a row have most of them in common.
    """

    def __init__(self, render: Callable[[Turns, bool], str], mark: str, num_context: int) -> None:
        """
        Args:
            render: `render(turns, is_open)` applies the template.
            mark: a text that occurs in no turn.
            num_context: number of first turns that are context; later answers belong to the policy.
        """
        self._renderer = render
        self._rendered: dict[tuple[tuple[tuple[str, str], ...], bool], str] = {}
        self._mark = mark
        self._num_context = num_context

    def placed(self, turns: Turns, answer: str) -> PlacedAnswer:
        """Locates the answer to `turns`.

        Raises:
            PromptError: the template drops answers, or changes earlier turns.
        """
        before = self._marked(turns)
        opened = self._render(before, True)
        marked = self._render([*before, ("assistant", self._mark)], False)
        template_head, mark, tail = marked.rpartition(self._mark)
        if not mark:
            raise PromptError(
                f"the chat template of policy.model drops answers of the assistant, as in {marked[-80:]!r}: use "
                "another template, or another checkpoint"
            )
        rendered = self._render([*before, ("assistant", answer)], False)
        _refuse_changed(self._question(before), rendered)
        if answers := [n for n, (_, text) in enumerate(before) if text == self._mark]:
            _refuse_changed(self._question(before[: answers[-1]]), opened)
        text = rendered.removesuffix(tail)
        start = _start_of(answer, text) if rendered.endswith(tail) else None
        shared = len(os.path.commonprefix([opened, template_head]))
        has_thought = answer.lstrip().startswith(THOUGHT)
        if start is None or (has_thought and "</think>" in text[shared:start]):  # the template adds a second thought
            if has_thought and opened.rstrip().endswith(THOUGHT):  # the generation prompt has opened the thought
                answer = re.sub(rf"^\s*{THOUGHT}\s*", "", answer)
            return self._behind_mark(opened, opened, answer, tail)
        if text.startswith(opened) and not text[len(opened) : start].strip():
            start = len(opened)  # also if the answer repeats the first words of the generation prompt
        return self._behind_mark(text[:start], os.path.commonprefix([opened, text[:start]]), text[start:], tail)

    def _render(self, turns: Turns, is_open: bool) -> str:
        key = (tuple(turns), is_open)
        if key not in self._rendered:
            self._rendered[key] = self._renderer(turns, is_open)
        return self._rendered[key]

    def _behind_mark(self, head: str, opened: str, text: str, tail: str) -> PlacedAnswer:
        return PlacedAnswer(head.rpartition(self._mark)[2], opened.rpartition(self._mark)[2], text, tail)

    def _marked(self, turns: Turns) -> list[tuple[str, str]]:
        """`turns` with marks instead of answers, so that texts of answers do not change the text behind them."""
        return [
            (role, self._mark if role == "assistant" and n >= self._num_context else text)
            for n, (role, text) in enumerate(turns)
        ]

    def _question(self, turns: Turns) -> str:
        """The text of `turns` without the text that the template adds at the end of a conversation."""
        return os.path.commonprefix([self._render(turns, False), self._render(turns, True)])


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
    """Start of the answer at the end of `rendered`; None if the template changed more than white space of it."""
    for written in (answer, answer.rstrip(), answer.strip()):
        if rendered.endswith(written):
            return len(rendered) - len(written)
    wanted = "".join(answer.split())
    positions = [n for n, character in enumerate(rendered) if not character.isspace()]
    if not wanted or len(wanted) > len(positions):
        return None
    start = positions[-len(wanted)]
    return start if "".join(rendered[start:].split()) == wanted else None
