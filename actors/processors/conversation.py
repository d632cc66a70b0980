"""ConversationProcessor: rows of offline jobs to groups, with a mask of the assistant's tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mobula.actors.datasets.conversations import Conversation, Ending
from mobula.actors.processors.chat import ChatProcessor, Measures, expand, measures_of
from mobula.actors.processors.text.answers import AnswerLayout, unused_mark
from mobula.cluster.errors import PromptError
from mobula.cluster.records.actions import Actions, TokenActions
from mobula.cluster.records.markup import plain
from mobula.cluster.records.media import MediaSpan
from mobula.cluster.records.trajectory import (
    FinishReason,
    Prompt,
    Response,
    Reward,
    ScoredGroup,
    Trajectory,
    TrajectoryGroup,
    WeightSpan,
)


class TooLongError(PromptError):
    """A conversation is longer than `offline.max_tokens`."""

    reason = "too_long"


@dataclass(frozen=True)
class _Rendered:
    """The text of a context with one ending, and its tokens, one placeholder an image."""

    text: str
    ids: np.ndarray  # int32 [T]
    starts: np.ndarray  # int64 [T]: first character of each token
    mask: np.ndarray  # bool [T]: trained tokens
    num_context: int  # tokens before the first answer


@dataclass(frozen=True)
class _Whole:
    """A context with one ending, as the learner reads it."""

    compact_ids: np.ndarray  # int32 [P], of the context
    ids: np.ndarray  # int32 [S], one id a vision embedding
    mask: np.ndarray  # bool [S]
    num_context: int
    spans: tuple[MediaSpan, ...]
    order: np.ndarray  # int64 [M]: index of each span's medium among images, videos, then sounds of the row


class ConversationProcessor:
    """Builds a group from each row: the context is the prompt, each ending is a trajectory, the label is the reward.

    The text of context and ending is tokenised once. It is the template's own; an answer that the template changes,
    such as by dropping its thought once a question follows, stays unchanged in it if it is trained. The actions are all
    tokens after the context. `action_mask` is True on the assistant's tokens: those that hold a character of a trained
    answer, and the token that ends it. A token that holds text of the template as well is no part of the context, and
    is trained if it holds more of the answer than white space. `behavior_logprobs` are 0, because no policy sampled the
    tokens.

    Media of later turns are in `prompt.media`; spans of these lie behind the prompt, among the actions.
    """

    def __init__(
        self, chat: ChatProcessor, *, system_prompt: str, max_tokens: int, has_tail: bool, trains_template: bool = False
    ) -> None:
        """`system_prompt` is the first turn of rows without a system message; none if empty. `has_tail`: an ending
        includes the last token of the chat template, which a reward model reads."""
        self.media_token_ids: tuple[int, ...] = ()  # none is banned: nothing is sampled
        self.template_token_ids: tuple[int, ...] = ()
        self.chat = chat
        self._system = (("system", system_prompt),) if system_prompt else ()
        self._max_tokens = max_tokens
        self._has_tail = has_tail
        self._trains_template = trains_template

    def prepare(self, row: Conversation, prompt_id: str) -> ScoredGroup:
        row = self._inlined(row)
        self._check(row)
        loaded = self.chat.load_media(row)
        text, wholes = self._laid_out(row, measures_of(loaded))
        stored = self.chat.store_media(loaded)
        num_context = wholes[0].num_context
        prompt = Prompt(
            prompt_id=prompt_id,
            sample_id=row.sample_id,
            text=plain(text),
            compact_ids=wholes[0].compact_ids,
            expanded_ids=wholes[0].ids[:num_context],
            media=tuple(stored[number] for number in wholes[0].order),
            media_spans=wholes[0].spans,
            references=tuple(_text(ending) for ending in row.endings if ending.label == row.endings[0].label),
        )
        trajectories = tuple(
            given_trajectory(
                f"{prompt_id}#{n}",
                TokenActions(whole.ids[num_context:].astype(np.int32)),
                whole.mask[num_context:],
                _text(ending),
            )
            for n, (whole, ending) in enumerate(zip(wholes, row.endings, strict=True))
        )
        group = TrajectoryGroup(prompt, trajectories)
        return ScoredGroup(group.summary(), group, tuple(Reward(ending.label) for ending in row.endings))

    def check(self, row: Conversation) -> int:
        """Returns the number of tokens of context and longest ending, from texts and headers. Decodes nothing."""
        row = self._inlined(row)
        self._check(row)
        _, wholes = self._laid_out(row, self.chat.measure_media(row))
        return max(len(whole.ids) for whole in wholes)

    def num_media(self, row: Conversation) -> int:
        return self.chat.num_media(row)

    def _inlined(self, row: Conversation) -> Conversation:
        num = len(row.context)
        turns = [self.chat.inlined((*row.context, *ending.turns), row.template, num) for ending in row.endings]
        endings = [replace(e, turns=tuple(found[num:])) for e, found in zip(row.endings, turns, strict=True)]
        return replace(row, context=tuple(turns[0][:num]), endings=tuple(endings))

    def _check(self, row: Conversation) -> None:
        self.chat.check_media(row)
        for turn in (*row.context, *(turn for ending in row.endings for turn in ending.turns)):
            self.chat.refuse_imitations(turn.text)

    def _laid_out(self, row: Conversation, measures: Measures) -> tuple[str, list[_Whole]]:
        has_system = row.context[0].role == "system"
        turns = [*(() if has_system else self._system), *((turn.role, turn.text) for turn in row.context)]
        later = [(turn.role, turn.text) for ending in row.endings for turn in ending.turns]
        mark = unused_mark([text for _, text in (*turns, *later)])
        layout = AnswerLayout(
            lambda given, is_open: self.chat.render(given, is_open=is_open, template=row.template), mark, len(turns)
        )
        endings = [self._rendered(layout, turns, ending) for ending in row.endings]
        first = min(endings, key=lambda ending: ending.num_context)
        num = len(os.path.commonprefix([ending.ids[: first.num_context].tolist() for ending in endings]))
        return first.text[: int(first.starts[num])], [self._whole(row, ending, num, measures) for ending in endings]

    def _rendered(self, layout: AnswerLayout, context: Sequence[tuple[str, str]], ending: Ending) -> _Rendered:
        """The text and tokens of a context with one ending. An end token follows each answer, even if the template has
        none. In some templates the end token is the start of the next turn."""
        trained = {len(context) + n for n, turn in enumerate(ending.turns) if turn.is_trained}
        pieces, done, tail = list[tuple[str, bool]](), "", ""
        turns = [*context, *((turn.role, turn.text) for turn in ending.turns)]
        for placed in layout.answers(turns, trained):
            if pieces and not done and (next_head := self.chat.end_of_turn(placed.head)):
                done, pieces[-1] = next_head[0], (next_head[0], pieces[-1][1])
            head, tail = placed.head.removeprefix(done), placed.tail
            end, _ = self.chat.first_end(tail) or ("", 0)
            behind = tail[: tail.index(end)]
            num_untrained = len(placed.opened.removeprefix(done)) if self._trains_template else len(head)
            pieces += [(head[:num_untrained], False), (head[num_untrained:] + placed.text, placed.is_trained)]
            pieces += [(behind, False), (end or self.chat.end_text(), placed.is_trained)]
            done = behind + end
        pieces.append((tail.removeprefix(done), False))
        texts = [self.chat.prepared(text) for text, _ in pieces]
        ends = np.cumsum([len(text) for text in texts])
        tokens = self.chat.tokens("".join(texts))
        mask = np.zeros(len(tokens.ids), dtype=bool)
        for (_, is_trained), text, piece_end in zip(pieces, texts, ends, strict=True):
            if is_trained:
                mask |= tokens.of(text, piece_end - len(text))
        num = len(mask) if self._has_tail else int(np.count_nonzero(tokens.starts < ends[-2]))
        num_context = tokens.num_before(int(ends[0]))
        return _Rendered("".join(texts), tokens.ids[:num], tokens.starts[:num], mask[:num], num_context)

    def _whole(self, row: Conversation, ending: _Rendered, num_context: int, measures: Measures) -> _Whole:
        positions, expansions, order = self.chat.media_expansions(ending.ids, row, measures)
        ids, spans = expand(ending.ids, positions, expansions)
        if len(ids) > self._max_tokens:
            raise TooLongError(
                f"{row.sample_id} has {len(ids)} tokens ({sum(map(len, expansions))} of them images, videos and "
                f"sounds), offline.max_tokens is {self._max_tokens}: raise it, or lower data.max_pixels, "
                "data.video.max_tokens or data.audio.max_seconds"
            )
        untrained = [np.zeros(len(expansion), dtype=bool) for expansion in expansions]
        mask, _ = expand(ending.mask, positions, untrained)
        num_added = sum(
            len(expansion) - 1
            for position, expansion in zip(positions, expansions, strict=True)
            if position < num_context
        )
        return _Whole(ending.ids[:num_context], ids, mask, num_context + num_added, spans, order)


def given_trajectory(trajectory_id: str, actions: Actions, mask: np.ndarray, text: str) -> Trajectory:
    """A trajectory that no policy sampled. `mask`: bool [T]."""
    num = len(mask)
    logprobs, spans = np.zeros(num, dtype=np.float32), (WeightSpan(0, 0, num),)
    return Trajectory(trajectory_id, actions, logprobs, mask, spans, FinishReason.STOP, Response(text, num, False))


def _text(ending: Ending) -> str:
    if len(ending.turns) == 1:
        return plain(ending.turns[0].text)
    return plain("\n".join(f"{turn.role}: {turn.text}" for turn in ending.turns))
