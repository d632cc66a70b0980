"""Rows of offline jobs to groups: a conversation's tokens, which of them are the assistant's, and its media."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from actors.datasets.conversations import Conversation, Ending, Turn
from actors.processors.chat import ChatProcessor, MeasuredMedia, expand
from cluster.errors import PromptError
from cluster.records.actions import TokenActions
from cluster.records.trajectory import (
    FinishReason,
    MediaSpan,
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
class _Pieces:
    """Rendered text and its tokens, one placeholder a picture."""

    text: str
    ids: np.ndarray  # int32 [T]
    mask: np.ndarray  # bool [T]: what is trained


@dataclass(frozen=True)
class _Whole:
    """A context with one ending, as a policy is trained on it."""

    ids: np.ndarray  # int32 [S], one placeholder a vision embedding
    mask: np.ndarray  # bool [S]
    num_context: int
    spans: tuple[MediaSpan, ...]
    order: np.ndarray  # int64 [M]: which of the row's media, pictures before videos before sounds, stands in each span


class ConversationProcessor:
    """Makes a group of each row: the context is its prompt, each ending a trajectory whose reward is the label.

    A trajectory's actions are all tokens after the context. `action_mask` is True on those that the assistant writes:
    the text of its turns and the token that ends each of them, without the template's words between turns. The pieces
    are tokenised one by one, as they would be if a policy had sampled the turns, so no token crosses a border. No
    policy has sampled them: `behavior_logprobs` are 0.

    `media_spans` of the prompt count on through the actions, where later turns have pictures.
    """

    def __init__(self, chat: ChatProcessor, *, system_prompt: str, max_tokens: int, has_tail: bool) -> None:
        """`system_prompt` begins rows that have no system message, unless it is empty. `max_tokens` is
        `offline.max_tokens`. With `has_tail` an ending goes on to the last token that the chat template writes: what a
        reward model reads.
        """
        self.media_token_ids: tuple[int, ...] = ()  # none is banned: nothing is sampled
        self.chat = chat
        self._system = (("system", system_prompt),) if system_prompt else ()
        self._max_tokens = max_tokens
        self._has_tail = has_tail

    def prepare(self, row: Conversation, prompt_id: str) -> ScoredGroup:
        """The row as a group, its media processed and stored.

        Raises:
            MediaError: a picture, video or sound cannot be used.
            PromptError: the row is too long, has too many media, or its text imitates special tokens.
        """
        self._check(row)
        loaded = self.chat.load_media(row)
        context, wholes = self._laid_out(row, loaded.measured)
        stored = self.chat.store_media(row, loaded)
        num_context = wholes[0].num_context
        prompt = Prompt(
            prompt_id=prompt_id,
            sample_id=row.sample_id,
            text=context.text,
            compact_ids=context.ids,
            expanded_ids=wholes[0].ids[:num_context],
            media=tuple(stored[number] for number in wholes[0].order),
            media_spans=wholes[0].spans,
            references=tuple(_text(ending) for ending in row.endings if ending.label == row.endings[0].label),
        )
        trajectories = tuple(
            _trajectory(f"{prompt_id}#{n}", whole.ids[num_context:], whole.mask[num_context:], _text(ending))
            for n, (whole, ending) in enumerate(zip(wholes, row.endings, strict=True))
        )
        group = TrajectoryGroup(prompt, trajectories)
        return ScoredGroup(group.summary(), group, tuple(Reward(ending.label) for ending in row.endings))

    def check(self, row: Conversation) -> int:
        """Tokens of the longest ending with its context, from texts and headers of pictures; nothing is decoded.

        Raises:
            MediaError, PromptError: as `prepare`, except for pictures that are damaged behind their header.
        """
        self._check(row)
        _, wholes = self._laid_out(row, self.chat.measure_media(row))
        return max(len(whole.ids) for whole in wholes)

    def num_media(self, row: Conversation) -> int:
        """How many media the prompt of a row has."""
        return self.chat.num_media(row)

    def _check(self, row: Conversation) -> None:
        self.chat.check_media(row)
        for turn in (*row.context, *(turn for ending in row.endings for turn in ending.turns)):
            self.chat.refuse_imitations(turn.text)

    def _laid_out(self, row: Conversation, measured: MeasuredMedia) -> tuple[_Pieces, list[_Whole]]:
        """The context, and it with each of the endings."""
        has_system = row.context[0].role == "system"
        turns = [*(() if has_system else self._system), *((turn.role, turn.text) for turn in row.context)]
        text = self.chat.render(turns, is_open=True)
        ids = self.chat.tokenize(text)
        context = _Pieces(text, ids, np.zeros(len(ids), dtype=bool))
        endings = [self._ending(row.sample_id, turns, text, ending) for ending in row.endings]
        return context, [self._whole(row, context, ending, measured) for ending in endings]

    def _ending(self, name: str, turns: Sequence[tuple[str, str]], text: str, ending: Ending) -> _Pieces:
        """The tokens behind `text`, the rendered context of `turns`."""
        done, pieces = text, list[tuple[np.ndarray, bool]]()
        so_far = list(turns)
        for turn in ending.turns:
            if turn.role == "assistant":
                before = self.chat.render(so_far, is_open=True)
                pieces.append((self.chat.tokenize(_rest(before, done, name)), False))
                after = self.chat.render([*so_far, (turn.role, turn.text)], is_open=False)
                answer, done = self._answer(name, turn, before, after)
                pieces.append((answer, turn.is_trained))
            so_far.append((turn.role, turn.text))
        if self._has_tail:
            whole = self.chat.render(so_far, is_open=False)
            pieces.append((self.chat.tokenize(_rest(whole, done, name)), False))
            done = whole
        ids = np.concatenate([piece for piece, _ in pieces])
        return _Pieces(done, ids, np.concatenate([np.full(len(piece), trained) for piece, trained in pieces]))

    def _answer(self, name: str, turn: Turn, before: str, after: str) -> tuple[np.ndarray, str]:
        """Ids of a turn of the assistant, the token that ends it included, and the rendered text up to there."""
        rest = _rest(after, before, name)
        written = next((text for text in (turn.text, turn.text.strip()) if rest.startswith(text)), None)
        end = None if written is None else self.chat.end_of_turn(rest[len(written) :])
        if written is None or end is None:
            raise PromptError(
                f"{name}: the chat template of policy.model writes an answer as {rest[:80]!r}, and not as its text and "
                "a token that ends it: use another template, or another checkpoint"
            )
        text, token = end
        return np.append(self.chat.tokenize(written), np.int32(token)), before + written + text

    def _whole(self, row: Conversation, context: _Pieces, ending: _Pieces, measured: MeasuredMedia) -> _Whole:
        compact = np.concatenate([context.ids, ending.ids])
        places, expansions, order = self.chat.media_expansions(compact, row, measured)
        ids, spans = expand(compact, places, expansions)
        if len(ids) > self._max_tokens:
            raise TooLongError(
                f"{row.sample_id} has {len(ids)} tokens ({sum(map(len, expansions))} of them pictures, videos and "
                f"sounds), offline.max_tokens is {self._max_tokens}: raise it, or lower data.max_pixels, "
                "data.video.max_tokens or data.audio.max_seconds"
            )
        untrained = [np.zeros(len(expansion), dtype=bool) for expansion in expansions]
        mask, _ = expand(np.concatenate([context.mask, ending.mask]), places, untrained)
        num_more = sum(len(e) - 1 for place, e in zip(places, expansions, strict=True) if place < len(context.ids))
        return _Whole(ids, mask, len(context.ids) + num_more, spans, order)


def _rest(text: str, start: str, name: str) -> str:
    """The part of `text` after `start`.

    Raises:
        PromptError: it begins otherwise, so the template has changed an earlier turn.
    """
    if not text.startswith(start):
        raise PromptError(
            f"{name}: the chat template of policy.model changes earlier turns when later ones follow, so these are "
            "not the tokens that were answered: split the row into one for each answer, or use another template"
        )
    return text[len(start) :]


def _trajectory(trajectory_id: str, ids: np.ndarray, mask: np.ndarray, text: str) -> Trajectory:
    num = len(ids)
    return Trajectory(
        trajectory_id=trajectory_id,
        actions=TokenActions(ids.astype(np.int32)),
        behavior_logprobs=np.zeros(num, dtype=np.float32),
        action_mask=mask,
        weight_spans=(WeightSpan(0, 0, num),),
        finish_reason=FinishReason.STOP,
        response=Response(text, num, False),
    )


def _text(ending: Ending) -> str:
    """The text of an ending, for reports."""
    if len(ending.turns) == 1:
        return ending.turns[0].text
    return "\n".join(f"{turn.role}: {turn.text}" for turn in ending.turns)
