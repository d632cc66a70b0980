"""Controls: the same rows with blank media, media of other rows, none, or another question."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image
from tokenizer_kinds import chat_of_model

from mobula.actors.datasets.media import EncodedFile, FrameList, encode_wav
from mobula.actors.datasets.rows import Row, Turn
from mobula.actors.environments.base import IMAGE_MARK, Message, encoded
from mobula.actors.environments.rows import ENVIRONMENT
from mobula.actors.processors.chat import ChatProcessor
from mobula.actors.rollout.controls import CONTROL, blank_image, controlled, controlled_observation
from mobula.configs.schema.run import Control
from mobula.learner.policies.tiny import TINY


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatProcessor:
    folder = TINY["qwen2.5-omni"](tmp_path_factory.mktemp("omni") / "model")
    words = [f"sampler.max_{kind}_per_prompt=3" for kind in ("images", "videos", "audios")]
    return chat_of_model(folder, *words, min_pixels=3136, max_pixels=50176)


def picture(shade: int, size: tuple[int, int] = (60, 40)) -> EncodedFile:
    return EncodedFile(encoded(np.full((size[1], size[0], 3), shade, dtype=np.uint8)), f"picture {shade}")


def row(name: str, question: str = "<image>What?", shades: Sequence[int] = (), **own: Any) -> Row:
    return Row(name, question, "7", "7", tuple(map(picture, shades)), **own)


def pixels(content: bytes) -> np.ndarray:
    return np.asarray(Image.open(BytesIO(content)).convert("RGB"))


def test_blank_media_have_the_size_the_length_and_the_tokens_of_the_given_ones(chat: ChatProcessor) -> None:
    frames = FrameList(tuple(picture(shade) for shade in range(0, 240, 30)), 4.0, "clip")
    sound = EncodedFile(encode_wav(np.sin(np.arange(20000.0)), 16000), "tone")
    given = row("r", "<image><video><audio>What?", (0,), videos=(frames,), audios=(sound,))
    [found] = controlled(Control.BLANK_IMAGE, [given], chat, seed=0)
    assert found.question == given.question
    image, [video], [audio] = pixels(found.images[0].content), found.videos, found.audios
    assert image.shape == (40, 60, 3) and (image == 128).all()
    assert all((pixels(frame.content) == 128).all() for frame in video.frames)
    samples, rate = soundfile.read(BytesIO(audio.content))
    assert (len(samples), rate, np.abs(samples).max()) == (20000, 16000, 0)
    prompts = [chat.prepare(each, "x") for each in (given, found)]
    assert np.array_equal(*(prompt.expanded_ids for prompt in prompts))
    assert not {m.key for m in prompts[0].media} & {m.key for m in prompts[1].media}


def test_each_row_gets_other_media_and_the_same_seed_the_same_ones(chat: ChatProcessor) -> None:
    rows = [row(f"r{n}", shades=[10 * (n // 3)]) for n in range(12)]  # three questions a picture
    found = controlled(Control.SWAPPED_IMAGE, rows, chat, seed=3)
    assert [each.sample_id for each in found] == [each.sample_id for each in rows]
    assert all(a.images[0].content != b.images[0].content for a, b in zip(found, rows, strict=True))
    assert {each.images[0].content for each in found} == {each.images[0].content for each in rows}
    assert found == controlled(Control.SWAPPED_IMAGE, rows, chat, seed=3)
    assert found != controlled(Control.SWAPPED_IMAGE, rows, chat, seed=4)


def test_rows_that_no_other_row_differs_from_are_left_out(chat: ChatProcessor) -> None:
    assert controlled(Control.SWAPPED_IMAGE, [row("a", shades=[1]), row("b", shades=[1])], chat, seed=0) == []
    several = [row("a", "<image><image>Which?", [1, 2]), row("b", shades=[3])]
    found = controlled(Control.SWAPPED_IMAGE, several, chat, seed=0)
    assert [[image.name for image in each.images] for each in found] == [["picture 3"] * 2, ["picture 1"]]


def test_without_media_the_text_has_no_placeholder_and_renders(chat: ChatProcessor) -> None:
    history = (Turn("user", "<image>Look."), Turn("assistant", "Yes."))
    [found] = controlled(Control.NO_IMAGE, [row("r", "<image>\nWhat?", [1, 2], history=history)], chat, seed=0)
    assert (found.images, found.question, found.history[0].text) == ((), "What?", "Look.")
    assert chat.prepare(found, "x").media == ()


@pytest.mark.parametrize("control", [Control.BLANK_IMAGE, Control.SWAPPED_IMAGE, Control.NO_IMAGE])
def test_rows_of_text_have_the_direct_prompt_alone(control: Control, chat: ChatProcessor) -> None:
    texts = [row("a", "1 + 1?"), row("b", "1 + 2?")]
    assert controlled(control, texts, chat, seed=0) == []
    assert controlled(Control.DIRECT_PROMPT, texts, chat, seed=0) == texts


def test_the_direct_prompt_has_no_system_turn_but_that_of_an_environment() -> None:
    turns = (Turn("system", "Think."), Turn("user", "Hello"))
    own, played = row("a", history=turns), row("b", history=turns, metadata={ENVIRONMENT: {"seed": 1}})
    found = controlled(Control.DIRECT_PROMPT, [own, played], None, seed=0)  # type: ignore[arg-type]  # not read
    assert [[turn.role for turn in each.history] for each in found] == [["user"], ["system", "user"]]


def test_an_environments_task_says_what_later_turns_show(chat: ChatProcessor) -> None:
    rows = [row(str(n), shades=[n], metadata={ENVIRONMENT: {"seed": n, "options": {}, "hash": "x"}}) for n in (1, 2)]
    swapped = controlled(Control.SWAPPED_IMAGE, rows, chat, seed=0)
    assert [each.metadata[ENVIRONMENT][CONTROL]["seed"] for each in swapped] == [2, 1]
    [blank, _] = controlled(Control.BLANK_IMAGE, rows, chat, seed=0)
    assert blank.metadata[ENVIRONMENT] == {"seed": 1, "options": {}, "hash": "x", CONTROL: {"name": "blank_image"}}


def test_observations_of_later_turns_are_changed_or_lose_their_images() -> None:
    shown = (Message("user", "a <image> b", (picture(9).content,)), Message("tool", f"<image> {IMAGE_MARK}", (b"x",)))
    assert [message.text for message in controlled_observation(shown, None)] == ["a  b", "<image> "]
    [blank] = controlled_observation(shown[:1], blank_image)
    assert (blank.text, pixels(blank.images[0]).shape) == ("a <image> b", (40, 60, 3))


def test_blank_files_are_read_from_disk_too(tmp_path: Path, chat: ChatProcessor) -> None:
    (tmp_path / "a.png").write_bytes(picture(5).content)
    given = Row("r", "<image>What?", "7", "7", (tmp_path / "a.png",))
    [found] = controlled(Control.BLANK_IMAGE, [given], chat, seed=0)
    assert pixels(found.images[0].content).shape == (40, 60, 3)
