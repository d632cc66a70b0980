"""Controls of an evaluation: rows whose media are blank, those of another row, or absent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from mobula.actors.datasets.media import Audio, EncodedFile, FrameList, ImageSource, Video, encode_wav
from mobula.actors.datasets.rows import Row
from mobula.actors.environments.base import Observation, placeholder_of
from mobula.actors.environments.rows import ENVIRONMENT
from mobula.actors.processors.chat import MEDIA_PLACEHOLDERS, ChatProcessor
from mobula.configs.schema.run import Control

KINDS = ("images", "videos", "audios")
CONTROL = "control"  # in the task of an environment's prompt
GREY = (128, 128, 128)


def controlled(control: Control, rows: Sequence[Row], chat: ChatProcessor, *, seed: int) -> list[Row]:
    """Returns the rows as `control` shows them. Rows without media are left out, as is a row whose media every other
    row has, too, where they are swapped."""
    if control is Control.DIRECT_PROMPT:
        return [row if ENVIRONMENT in row.metadata else _without_system(row) for row in rows]
    rows = [row for row in rows if _media(row)]
    match control:
        case Control.BLANK_IMAGE:
            blank = _Blank(chat)
            return [_marked(replace(row, **blank.media(row)), {"name": control}) for row in rows]
        case Control.NO_IMAGE:
            return [_marked(_without_media(row), {"name": control}) for row in rows]
        case Control.SWAPPED_IMAGE:
            return _swapped(rows, seed)


def controlled_observation(observation: Observation, change: Callable[[bytes], bytes] | None) -> Observation:
    """Changes the images of an observation; without `change`, removes them and their placeholders."""
    return tuple(
        replace(message, images=tuple(map(change, message.images)))
        if change
        else replace(message, text=message.text.replace(placeholder_of(message), ""), images=())
        for message in observation
    )


def blank_image(content: bytes) -> bytes:
    """A grey image of the size of an encoded one."""
    with Image.open(BytesIO(content)) as image:
        return _grey(image.size)


class _Blank:
    """Blank media of the size and length of given ones."""

    def __init__(self, chat: ChatProcessor) -> None:
        self._chat = chat

    def media(self, row: Row) -> dict[str, Any]:
        images, videos, audios = self._chat.measure_media(row)
        return {
            "images": tuple(map(self._image, row.images, images)),
            "videos": tuple(map(self._video, row.videos, videos)),
            "audios": tuple(map(self._sound, row.audios, audios)),
        }

    def _image(self, source: ImageSource, size: tuple[int, int]) -> ImageSource:
        return EncodedFile(_grey(size), f"blank of {source}")

    def _video(self, source: Video, clip: Any) -> Video:
        frame = EncodedFile(_grey((clip.width, clip.height)), f"blank of {source}")
        num = len(clip.timestamps)
        return FrameList((frame,) * num, num / clip.duration_s, f"blank of {source}")

    def _sound(self, source: Audio, num_samples: int) -> Audio:
        silence = np.zeros(num_samples, dtype=np.float32)
        return EncodedFile(encode_wav(silence, self._chat.sounds.limits.rate), f"silence of {source}")


def _grey(size: tuple[int, int]) -> bytes:
    png = BytesIO()
    Image.new("RGB", size, GREY).save(png, "PNG")
    return png.getvalue()


def _swapped(rows: Sequence[Row], seed: int) -> list[Row]:
    """Gives each row the media of the next row, in an order drawn by `seed`, that has the same kinds and no equal
    medium."""
    order = [rows[index] for index in np.random.default_rng(seed).permutation(len(rows))]
    place = {row.sample_id: position for position, row in enumerate(order)}
    found = []
    for row in rows:
        own, kinds = _contents(row), _kinds(row)
        after = (order[(place[row.sample_id] + n) % len(order)] for n in range(1, len(order)))
        other = next((each for each in after if kinds <= _kinds(each) and not own & _contents(each)), None)
        if other is not None:
            media: dict[str, Any] = {kind: _as_many(getattr(other, kind), len(getattr(row, kind))) for kind in kinds}
            task = other.metadata.get(ENVIRONMENT, {})
            mark = {"name": Control.SWAPPED_IMAGE, **{key: task[key] for key in ("seed", "options") if key in task}}
            found.append(_marked(replace(row, **media), mark))
    return found


def _as_many(media: Sequence[Any], num: int) -> tuple[Any, ...]:
    return tuple(media[index % len(media)] for index in range(num))


def _kinds(row: Row) -> set[str]:
    return {kind for kind in KINDS if getattr(row, kind)}


def _media(row: Row) -> tuple[Any, ...]:
    return (*row.images, *row.videos, *row.audios)


def _contents(row: Row) -> set[Any]:
    return {sha256(each.content).digest() if isinstance(each, EncodedFile) else each for each in _media(row)}


def _without_media(row: Row) -> Row:
    history = tuple(replace(turn, text=MEDIA_PLACEHOLDERS.sub("", turn.text)) for turn in row.history)
    question = MEDIA_PLACEHOLDERS.sub("", row.question).lstrip("\n")
    return replace(row, history=history, question=question, images=(), videos=(), audios=())


def _without_system(row: Row) -> Row:
    return replace(row, history=tuple(turn for turn in row.history if turn.role != "system"))


def _marked(row: Row, mark: Mapping[str, Any]) -> Row:
    """Adds the control to the task of an environment's row, for the observations of later turns."""
    if not row.metadata.get(ENVIRONMENT):  # tools on a row work on its images
        return row
    return replace(row, metadata={**row.metadata, ENVIRONMENT: {**row.metadata[ENVIRONMENT], CONTROL: dict(mark)}})
