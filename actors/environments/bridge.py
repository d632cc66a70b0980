"""TurnBridge: tokenises an observation between two turns of the policy, without tokenising earlier turns again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mobula.actors.datasets.media import EncodedFile, ImageSource
from mobula.actors.environments.base import IMAGE_PLACEHOLDER, ROLES_OF_STEP, EpisodeError, Message, row_text
from mobula.actors.processors.chat import ChatProcessor, expand
from mobula.actors.processors.media import LoadedMedium
from mobula.cluster.errors import SkippedSample
from mobula.cluster.records.media import MediaHandle, MediaSpan
from mobula.learner.policies.families.base import Size

MARK = "mark0"  # marks the end of an earlier turn of the policy in rendered text
EARLIER = (MARK, f"some other text, {MARK}", f"<think>\nidea\n</think>\n\n{MARK}")
PROBED = "probe1"


@dataclass(frozen=True)
class Delta:
    """The tokens after the end token of a turn: the observation, and the start of the next turn."""

    ids: np.ndarray  # int32 [D], one id a vision embedding
    spans: tuple[MediaSpan, ...]
    images: tuple[LoadedMedium[ImageSource, Size], ...]


class TurnBridge:
    """delta = render(earlier turn + observation) - render(earlier turn), without the token that ends the earlier turn.

    The next prompt is the ids so far and the delta. The delta is tokenised as a part of a whole conversation. This is
    exact only for templates that render an observation independently of the text before it; the constructor tests this.
    If a template refuses `tool` messages or drops their images, they become `user` turns.
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
        self.end_id: int = int(self._ids((Message("user", ""),))[0])

    def delta(self, observation: Sequence[Message]) -> Delta:
        """Tokenises an observation; images are measured and not processed yet."""
        try:
            observation = [replace(m, text=self._chat.checked_text(row_text(m))) for m in observation]
            files = [EncodedFile(p, "an image of an observation") for m in observation for p in m.images]
            images = tuple(map(self._chat.images.load, files))
            compact = self._ids(self._merged(observation))[1:]
            sizes = [image.measure for image in images]
            positions, expansions = self._chat.images.expansions(compact, files, sizes, "an observation")
            ids, spans = expand(compact, positions, expansions)
            return Delta(ids.astype(np.int32), spans, images)
        except SkippedSample as error:
            raise EpisodeError(error.reason, str(error)) from error

    def stored(self, delta: Delta) -> tuple[MediaHandle, ...]:
        """Processes and stores the images of an admitted delta; equal files are processed once."""
        try:
            return tuple(map(self._chat.images.store, delta.images))
        except SkippedSample as error:
            raise EpisodeError(error.reason, str(error)) from error

    def _merged(self, observation: Sequence[Message]) -> list[Message]:
        """Maps messages to roles that the template takes; adjacent messages of one role are merged to a turn."""
        turns: list[Message] = []
        for message in observation:
            role = self._roles[message.role]
            if turns and turns[-1].role == role:
                before = turns.pop()
                turns.append(Message(role, f"{before.text}\n{message.text}", (*before.images, *message.images)))
            else:
                turns.append(Message(role, message.text, message.images))
        return turns

    def _rendered(self, turns: Sequence[Message], earlier: str) -> tuple[str, str]:
        """The rendered text up to the end of an earlier turn's text, and behind it."""
        messages = [("user", PROBED), ("assistant", earlier), *((turn.role, turn.text) for turn in turns)]
        before, mark, rest = self._chat.render(messages, is_open=True).partition(MARK)
        return (before + mark, rest) if mark else ("", "")

    def _ids(self, turns: Sequence[Message]) -> np.ndarray:
        """Returns int32 [D + 1]: the tokens behind the text of an earlier turn, from its end token on."""
        before, rest = map(self._chat.prepared, self._rendered(turns, MARK))
        end = self._chat.end_of_turn(rest.lstrip())
        assert end is not None, "the constructor has checked this"
        tokens = self._chat.tokens(before + rest)
        return tokens.ids[tokens.num_before(len(before) + rest.index(end[0])) :]

    def _problem(self, role: str) -> str | None:
        assert role in ROLES_OF_STEP
        text = f"{PROBED}{IMAGE_PLACEHOLDER}" if self._chat.takes_images else PROBED
        turns = (Message(role, text),)
        try:
            rendered = [self._rendered(turns, earlier)[1] for earlier in EARLIER]
        except Exception as error:  # templates raise errors of any type
            return f"it refuses a {role} turn ({type(error).__name__}: {error})"
        if len(set(rendered)) != 1:
            return f"what it writes for a {role} turn depends on the text of the turn before"
        end = self._chat.end_of_turn(rendered[0].lstrip())
        if end is None:
            return f"it writes {rendered[0][:40]!r} behind a turn, which begins with no token that ends one"
        if PROBED not in rendered[0]:
            return f"it drops the text of a {role} turn"
        ids = self._ids(turns)
        if ids[0] != end[1]:
            return f"its tokenizer does not read {end[0]!r} behind a turn as one token"
        if not self._chat.takes_images:
            return None
        num = int(np.count_nonzero(ids == self._chat.images.placeholder_id))
        return None if num == 1 else f"it writes {num} placeholders for the one image of a {role} turn"
