"""TurnBridge: the tokens between two turns of the policy, without tokenising earlier turns again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mobula.actors.datasets.images import EncodedFile
from mobula.actors.environments.base import IMAGE_PLACEHOLDER, ROLES_OF_STEP, EpisodeError, Message, row_text
from mobula.actors.processors.chat import ChatProcessor, expand
from mobula.cluster.errors import SkippedSample
from mobula.cluster.records.media import MediaHandle, MediaSpan

MARK = "mark0"  # where an earlier turn of the policy ends in rendered text
EARLIER = (MARK, f"some other text, {MARK}", f"<think>\nidea\n</think>\n\n{MARK}")
PROBED = "probe1"


@dataclass(frozen=True)
class Delta:
    """The tokens that follow the token that ended a turn: the observation, and the head of the next turn."""

    ids: np.ndarray  # int32 [D], one placeholder a vision embedding
    spans: tuple[MediaSpan, ...]
    images: tuple[EncodedFile, ...]


class TurnBridge:
    """delta = render(earlier turn + observation) - render(earlier turn), cut behind the token that ends a turn.

    The next prompt is the exact ids so far and the delta. This holds only for templates that write an observation in
    the same way whatever the turn before it says, which the constructor tries. A `tool` message that a template does
    not take, or whose image it drops, goes into a `user` turn.

    Raises:
        ValueError: the chat template of the model changes with the earlier turn, drops images, or has no token that
            ends a turn.
    """

    def __init__(self, chat: ChatProcessor, model: str) -> None:
        self._chat = chat
        self._model = model
        self._roles = {"user": "user"}
        if (problem := self._problem("user")) is not None:
            raise ValueError(
                f"the chat template of policy.model={model} cannot be used for several turns: {problem}; "
                "use another checkpoint, or environment=none"
            )
        self._roles["tool"] = "tool" if self._problem("tool") is None else "user"
        text = self._rendered((Message("user", ""),), MARK)
        end = chat.end_of_turn(text)
        assert end is not None, "the probe has found it"
        self.end_id: int = end[1]

    def delta(self, observation: Sequence[Message]) -> Delta:
        """The tokens of an observation, whose text stays text; its images are measured, not yet processed.

        Raises:
            EpisodeError: an image cannot be used.
        """
        try:
            return self._delta(observation)
        except SkippedSample as error:
            raise EpisodeError(error.reason, str(error)) from error

    def stored(self, delta: Delta) -> tuple[MediaHandle, ...]:
        """The images of an admitted delta, processed; equal files are processed once.

        Raises:
            EpisodeError: an image is damaged.
        """
        try:
            return tuple(self._chat.store_image(image.content, image) for image in delta.images)
        except SkippedSample as error:
            raise EpisodeError(error.reason, str(error)) from error

    def _delta(self, observation: Sequence[Message]) -> Delta:
        observation = [replace(m, text=self._chat.checked_text(row_text(m))) for m in observation]
        images = tuple(EncodedFile(p, "an image of an observation") for m in observation for p in m.images)
        text = self._rendered(self._merged(observation), MARK)
        end = self._chat.end_of_turn(text)
        assert end is not None, "the probe has found it"
        compact = self._chat.tokenize(text[len(end[0]) :])
        _, sizes = self._chat.read_images(images)
        places, expansions = self._chat.expansions(compact, images, sizes, "an observation")
        ids, spans = expand(compact, places, expansions)
        return Delta(ids.astype(np.int32), spans, images)

    def _merged(self, observation: Sequence[Message]) -> list[Message]:
        """Messages under the roles that the template takes; neighbours of one role are one turn."""
        turns: list[Message] = []
        for message in observation:
            role = self._roles[message.role]
            if turns and turns[-1].role == role:
                before = turns.pop()
                turns.append(Message(role, f"{before.text}\n{message.text}", (*before.images, *message.images)))
            else:
                turns.append(Message(role, message.text, message.images))
        return turns

    def _rendered(self, turns: Sequence[Message], earlier: str) -> str:
        """The text that the template writes behind the text of an earlier turn."""
        messages = [("user", PROBED), ("assistant", earlier), *((turn.role, turn.text) for turn in turns)]
        _, mark, rest = self._chat.render(messages, is_open=True).partition(MARK)
        return rest if mark else ""

    def _problem(self, role: str) -> str | None:
        """Why a turn of `role` cannot follow a turn of the policy; None if it can."""
        assert role in ROLES_OF_STEP
        text = f"{PROBED}{IMAGE_PLACEHOLDER}" if self._chat.takes_images else PROBED
        turns = (Message(role, text),)
        try:
            rendered = [self._rendered(turns, earlier) for earlier in EARLIER]
        except Exception as error:  # templates refuse in their own ways
            return f"it refuses a {role} turn ({type(error).__name__}: {error})"
        if len(set(rendered)) != 1:
            return f"what it writes for a {role} turn depends on the text of the turn before"
        end = self._chat.end_of_turn(rendered[0])
        if end is None:
            return f"it writes {rendered[0][:40]!r} behind a turn, which begins with no token that ends one"
        if PROBED not in rendered[0]:
            return f"it drops the text of a {role} turn"
        if not self._chat.takes_images:
            return None
        ids = self._chat.tokenize(rendered[0])
        num = int(np.count_nonzero(ids == self._chat.image_token_id))
        return None if num == 1 else f"it writes {num} placeholders for the one image of a {role} turn"
