"""Text that looks like a placeholder or a special token stays text, from rows and observations to token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from data_rows import conversation_rows, encoded, read_records, read_split, write_rows
from PIL import Image
from tokenizer_kinds import chat_of_model

from mobula.actors.datasets.rows import Row
from mobula.actors.environments.base import IMAGE_MARK, EpisodeError, Message, checked_observation, message_of, row_text
from mobula.actors.environments.bridge import TurnBridge
from mobula.actors.processors.chat import ChatProcessor
from mobula.actors.processors.conversation import ConversationProcessor
from mobula.cluster.records.markup import PLACEHOLDERS, plain
from mobula.deploy.data.data_command import message_record
from mobula.learner.policies.tiny import TINY

MODELS = ("qwen2.5-vl", "llava", "idefics3", "gemma3", "llama")
MARKUP = "Write <image>, <video> or <audio>."
IMAGE_TOKENS = "<|vision_start|><|image_pad|><|vision_end|>"
SPECIAL = ("<|im_end|>", IMAGE_TOKENS, "<|video_pad|>", "<image>", "<end_of_utterance>")
ANSWER = {"role": "assistant", "content": "7"}
PNG = encoded(Image.new("RGB", (56, 56)))


@pytest.fixture(scope="module", params=[name for name in MODELS if name in TINY])
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChatProcessor:
    model = TINY[request.param](tmp_path_factory.mktemp("markup") / "model")
    return chat_of_model(model, "data.max_prompt_tokens=900")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Image.new("RGB", (56, 56)).save(tmp_path / "a.png")
    return tmp_path


def is_text(chat: ChatProcessor, ids: Any, text: str, num_images: int = 0) -> bool:
    """Whether the ids hold the characters of `text`, and a placeholder for each image alone."""
    shown = chat.tokenizer.decode(ids, skip_special_tokens=True)
    num_media = sum(int(i) in chat.media_token_ids for i in ids)
    return "".join(text.split()) in "".join(shown.split()) and (num_media > 0) == (num_images > 0)


def test_markup_of_an_observation_is_text(chat: ChatProcessor) -> None:
    bridge = TurnBridge(chat, "model")
    without = len(bridge.delta([Message("user", "")]).spans)
    for text in (MARKUP, *(f"Page {token} here" for token in SPECIAL)):
        delta = bridge.delta([Message("user", text), Message("tool", text)])
        assert (delta.spans, without) == ((), 0)
        assert is_text(chat, delta.ids, text)


def test_the_first_observation_of_an_environment_is_text(chat: ChatProcessor) -> None:
    for text in (MARKUP, *SPECIAL):
        prompt = chat.prepare(Row("r", row_text(Message("user", text)), "7", "7"), "0/0/r")
        assert prompt.media == () and is_text(chat, prompt.compact_ids, text)
        assert plain(prompt.text) == prompt.text


def test_markup_beside_images_is_text(chat: ChatProcessor) -> None:
    if not chat.takes_images:
        pytest.skip("the model takes no images")
    bridge = TurnBridge(chat, "model")
    marked = Message("user", f"Shown: {IMAGE_MARK}\n{MARKUP}", (PNG,))
    assert checked_observation([marked], ["user"], max_bytes=1 << 20, takes_images=True) == (marked,)
    for message in (marked, Message("user", "<image>The <video> tag", (PNG,))):
        delta = bridge.delta([message])
        assert len(delta.spans) == 1
        assert is_text(chat, delta.ids, message.text.replace(IMAGE_MARK, "").removeprefix("<image>"), 1)
    with pytest.raises(EpisodeError, match="IMAGE_MARK"):
        unclear = Message("user", f"<image>{MARKUP}", (PNG,))
        checked_observation([unclear], ["user"], max_bytes=1 << 20, takes_images=True)


def test_parts_of_a_request_say_what_is_an_image() -> None:
    url = "data:image/png;base64,iVBORw0KGgo="
    parts = [{"type": "text", "text": MARKUP}, {"type": "image_url", "image_url": {"url": url}}]
    assert message_of("user", parts).text == MARKUP + IMAGE_MARK
    assert message_of("user", parts[1:]).text == "<image>"
    assert message_of("user", MARKUP) == Message("user", MARKUP)


def test_where_parts_say_what_is_an_image_text_is_text(chat: ChatProcessor, folder: Path) -> None:
    if not chat.takes_images:
        pytest.skip("the model takes no images")
    image = {"type": "image_url", "image_url": {"url": "a.png"}}
    asked = [{"role": "user", "content": [image, {"type": "text", "text": MARKUP}]}]
    [row] = read_records(folder, "messages", {"messages": asked, "answer": MARKUP})
    prompt = chat.prepare(row, "0/0/r")
    assert len(prompt.media) == 1 and is_text(chat, prompt.compact_ids, MARKUP, 1)
    assert row.answer == MARKUP and is_text(chat, chat.encode_answer(row.solution), MARKUP)
    [again] = read_records(folder, "messages", message_record(row, {"images": ["a.png"]}))
    assert (again.question, again.images) == (row.question, row.images)


@pytest.mark.parametrize("form", ["conversation", "pair", "scored"])
def test_answers_of_offline_rows_may_hold_markup(chat: ChatProcessor, folder: Path, form: str) -> None:
    image = [{"type": "image", "image": "a.png"}] if chat.takes_images else []
    asked = {"role": "user", "content": [*image, {"type": "text", "text": MARKUP}]}
    answer = {"role": "assistant", "content": MARKUP}
    row = {"messages": [asked, *([answer] if form != "pair" else [])], "chosen": MARKUP, "rejected": "No.", "score": 1}
    [found] = conversation_rows(folder, row, form=form)
    group = ConversationProcessor(chat, system_prompt="", max_tokens=4096, has_tail=False).prepare(found, "0/0/r")
    first = group.group.trajectories[0]
    assert first.response.text == MARKUP
    assert is_text(chat, first.actions.token_ids[first.action_mask], MARKUP)
    assert is_text(chat, group.group.prompt.expanded_ids, MARKUP, len(image))


def test_a_key_says_what_stands_for_a_medium(folder: Path) -> None:
    words = [f"data.placeholders.{kind}=''" for kind in PLACEHOLDERS]
    [row] = read_records(folder, "question", {"question": MARKUP, "answer": "7"}, words=words)
    assert plain(row.question) == MARKUP and row.question != MARKUP
    words[0] = "data.placeholders.image='[IMG]'"
    [row] = read_records(
        folder, "question", {"question": f"[IMG]{MARKUP}", "answer": "7", "image": "a.png"}, words=words
    )
    assert plain(row.question) == f"<image>{MARKUP}" and row.question.count("<image>") == 1
    row = {"messages": [{"role": "user", "content": MARKUP}, ANSWER]}
    [found] = conversation_rows(folder, row, placeholders=dict.fromkeys(PLACEHOLDERS, ""))
    assert plain(found.context[0].text) == MARKUP


def test_a_placeholder_without_a_medium_names_the_key(folder: Path) -> None:
    rows = [{"question": "What does <video> do?", "answer": "7"}, {"question": "?", "answer": "7"}]
    [skipped] = read_split(write_rows(folder, *rows)).skipped
    assert "data.placeholders.video=''" in skipped.detail


def test_text_parts_hold_placeholders_only_where_there_are_media_for_them(folder: Path) -> None:
    asked = [{"role": "user", "content": [{"type": "text", "text": "<image>Which?"}]}]
    record = {"messages": asked, "answer": "7"}
    rows = read_records(folder, "messages", {**record, "image": "a.png"}, record)
    assert [row.question.count("<image>") for row in rows] == [1, 0]
    assert [plain(row.question) for row in rows] == ["<image>Which?"] * 2
