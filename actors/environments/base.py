"""The protocol of an environment: what it is given, what it returns, and how both are checked."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from numbers import Real
from typing import Any, NamedTuple, Protocol

import numpy as np
from PIL import Image

from mobula.cluster.errors import MobulaError
from mobula.cluster.records.markup import PLACEHOLDERS, literal, verbatim

IMAGE_PLACEHOLDER = PLACEHOLDERS["image"]
IMAGE_MARK = "\ufdd2"  # stands for an image where `<image>` is text
ROLES_OF_RESET = ("system", "user")
ROLES_OF_STEP = ("user", "tool")
SEEDS_A_SPLIT = 1_000_000  # the seeds of the train, validation and test split begin at 0, 1 and 2 of these


class EpisodeError(MobulaError):
    """One episode failed; the run goes on without its reward. `kind` is a word to count by."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind

    def __reduce__(self) -> tuple[Any, ...]:
        return EpisodeError, (self.kind, str(self))


@dataclass(frozen=True)
class Message:
    """One chat message of an environment; `text` holds one `<image>` for each of `images` (encoded files).

    A text without images may hold any markup. In a text with images, a literal `<image>` is written as IMAGE_MARK.
    """

    role: str
    text: str
    images: tuple[bytes, ...] = field(default=(), repr=False)


Observation = tuple[Message, ...]


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call. `parameters` maps the name of an argument to its description."""

    name: str
    description: str
    parameters: Mapping[str, str]  # a name that begins with ** says that a call may have arguments of other names


@dataclass(frozen=True)
class ToolCall:
    """One call that the policy wrote. `arguments` is empty unless `status` is `ok` or `unknown_tool`."""

    name: str
    arguments: Mapping[str, Any]
    status: str
    """ok | invalid_json | unclosed_block | missing_name | malformed_structure | unknown_tool | unknown_argument"""
    detail: str = ""  # of a status other than `ok`: what is wrong

    @property
    def error(self) -> str:
        """What an environment answers to a call whose status is not `ok`."""
        return f"error: {self.status}" + (f": {self.detail}" if self.detail else "")


@dataclass(frozen=True)
class Action:
    """One turn of the policy: its text, the calls in it, and whether the length limit cut it."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    is_truncated: bool = False

    @property
    def status(self) -> str:
        """`none` without calls, the first status that is not `ok`, else `ok`."""
        if not self.tool_calls:
            return "none"
        return next((call.status for call in self.tool_calls if call.status != "ok"), "ok")


@dataclass(frozen=True)
class EnvironmentSpec:
    """Description of an environment. An episode is truncated after `max_turns` turns of the policy.

    `is_deterministic` says that equal actions after a reset with equal seeds give equal observations: an episode whose
    rollout actor is lost then goes on elsewhere by playing its turns again, and else begins again. `demonstrates` says
    that it is a `Demonstrator`.
    """

    max_turns: int
    tools: tuple[Tool, ...] = ()
    is_deterministic: bool = True
    demonstrates: bool = False


class Reset(NamedTuple):
    """The start of an episode. `info` may hold `answer` and `solution` (what a supervised step teaches), as text."""

    observation: Observation
    info: Mapping[str, Any]


class Step(NamedTuple):
    """The result of one turn. A reward is a number, or named parts whose sum counts."""

    observation: Observation
    reward: float | Mapping[str, float]
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]


class Environment(Protocol):
    """One episode at a time, with the semantics of Gymnasium. Methods are synchronous: they run in a host."""

    spec: EnvironmentSpec

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> Reset:
        """Begin an episode. Equal seeds and options must give equal observations."""
        ...

    def step(self, action: Action) -> Step: ...

    def close(self) -> None: ...


class Demonstrator(Environment, Protocol):
    """An environment that knows a good turn in every state; a warm start learns whole episodes of them."""

    def demonstrate(self) -> str:
        """The text of a good next turn. Asked after `reset`, and after each `step` that does not end the episode."""
        ...


def marked_message(role: str, text: str, images: Sequence[bytes]) -> Message:
    """A message whose `text` holds IMAGE_MARK for each image, so that all else in it is text."""
    is_plain = IMAGE_PLACEHOLDER not in text
    return Message(role, text.replace(IMAGE_MARK, IMAGE_PLACEHOLDER) if is_plain else text, tuple(images))


def place_of(message: Message) -> str:
    """The text that stands for each image of a message that has images."""
    return IMAGE_MARK if IMAGE_MARK in message.text else IMAGE_PLACEHOLDER


def row_text(message: Message) -> str:
    """The text of a message as a row holds it (`cluster.records.markup`): no part of it becomes a medium or a special
    token but the placeholders of its images.
    """
    pieces = message.text.split(place_of(message)) if message.images else [message.text.replace(IMAGE_MARK, "")]
    return verbatim(IMAGE_PLACEHOLDER.join(map(literal, pieces)))


def split_of(seed: int) -> tuple[int, int]:
    """The number of the split that a seed is of (0 train, 1 validation, 2 test), and its place there."""
    return divmod(seed, SEEDS_A_SPLIT)


def encoded(pixels: np.ndarray, *, scale: int = 1) -> bytes:
    """uint8 [H, W, 3] as a PNG file, each pixel repeated `scale` times in both directions."""
    png = BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels).repeat(scale, 0).repeat(scale, 1)).save(png, format="PNG")
    return png.getvalue()


def observation_hash(observation: Observation) -> str:
    """Equal for equal roles, texts and images."""
    digest = hashlib.sha256()
    for message in observation:
        for part in (message.role.encode(), message.text.encode(), *message.images):
            digest.update(len(part).to_bytes(8, "big") + part)
        digest.update(b"\0" * 8)
    return digest.hexdigest()


def checked_observation(
    observation: Sequence[Message], roles: Sequence[str], *, max_bytes: int, takes_images: bool
) -> Observation:
    """The observation, if it can be rendered.

    Raises:
        EpisodeError: a role, a number of placeholders, a size or an image does not fit.
    """
    num_bytes = 0
    for message in observation:
        if not isinstance(message, Message):
            raise EpisodeError("bad_observation", f"an observation holds {type(message).__name__}: return Messages")
        if message.role not in roles:
            raise EpisodeError("unknown_role", f"the role {message.role!r} is none of {', '.join(roles)}: use one")
        num_places = message.text.count(place_of(message))
        if message.images and num_places != len(message.images):
            raise EpisodeError(
                "bad_observation",
                f"a message has {len(message.images)} images and {num_places} {IMAGE_PLACEHOLDER}: write one each, "
                f"or IMAGE_MARK of actors.environments.base where {IMAGE_PLACEHOLDER} is text",
            )
        if message.images and not takes_images:
            raise EpisodeError(
                "image_in_text_model",
                "an observation has an image and policy.model takes none: choose a vision-language model",
            )
        num_bytes += len(message.text.encode()) + sum(map(len, message.images))
    if num_bytes > max_bytes:
        raise EpisodeError(
            "observation_too_large",
            f"an observation has {num_bytes:,} bytes, environment.max_observation_bytes is {max_bytes:,}: "
            "make it smaller or raise the limit",
        )
    return tuple(observation)


def checked_rewards(reward: float | Mapping[str, float]) -> dict[str, float]:
    """The parts of a reward by name.

    Raises:
        EpisodeError: a part is no finite number.
    """
    parts = dict(reward) if isinstance(reward, Mapping) else {"reward": reward}
    for name, value in parts.items():
        if not isinstance(value, Real | np.bool_) or not math.isfinite(value):
            raise EpisodeError("reward_not_finite", f"the reward {name}={value!r} is no finite number: return one")
    return {str(name): float(value) for name, value in parts.items()}
