"""AnswerLayout: separates answers from the chat template's text around them. Tokens: ids and the text of each."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from transformers import PreTrainedTokenizerBase

from mobula.cluster.errors import PromptError
from mobula.cluster.records.markup import BREAK

Turns = Sequence[tuple[str, str]]
"""(role, text) of each turn."""

THOUGHT = "<think>"


@dataclass(frozen=True)
class Tokens:
    """The tokens of a text. White space that a tokenizer drops belongs to the token behind it."""

    ids: np.ndarray  # int32 [T]
    starts: np.ndarray  # int64 [T]: first character of each token
    ends: np.ndarray  # int64 [T]

    def num_before(self, end: int) -> int:
        """Number of tokens that hold characters before `end` alone."""
        return int(np.count_nonzero(self.ends <= end))

    def of(self, text: str, start: int) -> np.ndarray:
        """Returns bool [T]: the tokens of `text` at `start`. One that holds other text as well counts if it holds a
        character of `text` that is no white space."""
        end = start + len(text)
        first, last = end - len(text.lstrip()), start + len(text.rstrip())
        is_inside = (self.starts >= start) & (self.ends <= end)
        return is_inside | ((self.starts < last) & (self.ends > first))


def tokens_of(tokenizer: PreTrainedTokenizerBase, text: str) -> Tokens:
    """Tokenises a text once. Breaks divide the text and have no tokens."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = np.array(encoded.input_ids, dtype=np.int32)
    starts, ends = np.array(encoded.offset_mapping, dtype=np.int64).reshape(-1, 2).T
    if BREAK in text:
        num_breaks = np.cumsum([0, *(character == BREAK for character in text)])
        held = num_breaks[ends] - num_breaks[starts]
        joined = (held > 0) & (held < ends - starts)
        if (known := joined & (ids != tokenizer.unk_token_id)).any():
            shown = text[starts[known][0] : ends[known][0]].replace(BREAK, "")
            raise PromptError(f"the tokenizer of policy.model cannot read {shown!r} as text: remove it from the row")
        kept = joined | (held == 0)
        ids, starts, ends = ids[kept], starts[kept], ends[kept]
    ends = np.maximum.accumulate(ends)
    starts = np.minimum(starts, np.append(0, ends)[:-1])
    return Tokens(ids, starts, np.maximum(ends, starts + 1))


@dataclass(frozen=True)
class PlacedAnswer:
    """An answer as a policy writes it, and the template's text around it."""

    head: str  # text since the previous answer
    opened: str  # the part of the head that a generation prompt has as well
    text: str
    tail: str
    is_trained: bool


class AnswerLayout:
    """Locates answers: renders a conversation twice, with the answer and with a mark instead of the answer.

    Text before an answer (such as an empty thought) and behind it belongs to the template. White space directly before
    an answer belongs to the policy, because a tokenizer joins it to the first word. If the template changes a trained
    answer (such as dropping the thought from an earlier turn), each answer follows its generation prompt unchanged, and
    stays in the text of later turns.

    Rendered texts are kept: the answers of a row have most of them in common.
    """

    def __init__(self, render: Callable[[Turns, bool], str], mark: str, num_context: int) -> None:
        """`render(turns, is_open)` applies the template; `mark` is a text that occurs in no turn. Answers after the
        first `num_context` turns belong to the policy."""
        self._renderer = cache(render)
        self._mark = mark
        self._num_context = num_context

    def answers(self, turns: Turns, trained: Collection[int]) -> list[PlacedAnswer]:
        """Locates the turns of the numbers `trained` and the last turn; or all answers, if the template changes one."""
        if (found := self._in_whole(turns, trained)) is not None:
            return found
        policy = [n for n, (role, _) in enumerate(turns) if role == "assistant" and n >= self._num_context]
        return [self._behind_prompt(turns[:n], turns[n][1], n in trained) for n in policy]

    def _in_whole(self, turns: Turns, trained: Collection[int]) -> list[PlacedAnswer] | None:
        """The answers in the rendered text of all turns; None if the template changes one, or the text before it."""
        rendered, done, found = self._render(turns, False), 0, list[PlacedAnswer]()
        for n in sorted({*trained, len(turns) - 1}):
            before, answer = turns[:n], turns[n][1]
            marked = [*before, ("assistant", self._mark)]
            opened, as_last = self._render(before, True), self._render(marked, False)
            head, mark, behind = self._render([*marked, *turns[n + 1 :]], False).rpartition(self._mark)
            text = rendered.removesuffix(behind)
            start = _start_of(answer, text) if mark and rendered.endswith(behind) else None
            if start is None or not rendered.startswith(self._question(before)):
                return None
            shared = len(os.path.commonprefix([opened, head]))
            if answer.lstrip().startswith(THOUGHT) and "</think>" in text[shared:start]:  # a second thought
                return None
            if text.startswith(opened) and not text[len(opened) : start].strip():
                start = len(opened)  # also if the answer repeats the first words of the generation prompt
            opened = os.path.commonprefix([opened, text[:start]])[done:]
            tail = os.path.commonprefix([as_last.rpartition(self._mark)[2], behind])
            found.append(PlacedAnswer(text[done:start], opened, text[start:], tail, n in trained))
            done = len(text)
        return found

    def _behind_prompt(self, turns: Turns, answer: str, is_trained: bool) -> PlacedAnswer:
        """The answer to `turns` as the last turn. Marks stand for earlier answers, so that their text has no effect."""
        before = [
            (role, self._mark if role == "assistant" and n >= self._num_context else text)
            for n, (role, text) in enumerate(turns)
        ]
        opened, marked = self._render(before, True), self._render([*before, ("assistant", self._mark)], False)
        if self._mark not in marked[len(os.path.commonprefix([opened, marked])) :]:
            raise PromptError(
                f"the chat template of policy.model drops answers of the assistant, as in {marked[-80:]!r}: use "
                "another template, or another checkpoint"
            )
        answered = [*before, ("assistant", answer)]
        _refuse_changed(self._question(before), self._render(answered, False))
        if answers := [n for n, (_, text) in enumerate(before) if text == self._mark]:
            _refuse_changed(self._question(before[: answers[-1]]), opened)
        if found := self._in_whole(answered, (len(turns),) if is_trained else ()):
            placed = found[0]
        else:
            if answer.lstrip().startswith(THOUGHT) and opened.rstrip().endswith(THOUGHT):  # the prompt has opened it
                answer = re.sub(rf"^\s*{THOUGHT}\s*", "", answer)
            placed = PlacedAnswer(opened, opened, answer, marked.rpartition(self._mark)[2], is_trained)
        head, opened = (text.rpartition(self._mark)[2] for text in (placed.head, placed.opened))
        return replace(placed, head=head, opened=opened)

    def _render(self, turns: Turns, is_open: bool) -> str:
        return self._renderer(tuple(turns), is_open)

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
