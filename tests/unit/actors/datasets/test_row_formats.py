"""Row formats: columns and turns of each, their media, and fields that are read, refused or counted."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from data_rows import (
    conversation_rows,
    data_config,
    encoded,
    read_records,
    read_split,
    record_of_each_format,
    write_rows,
)
from PIL import Image
from typer.testing import CliRunner

from mobula.actors.datasets.conversations import read_conversations
from mobula.actors.datasets.formats.records import FORMATS
from mobula.actors.datasets.media import DownloadLimits, ImageError, MediaDownloads, VideoInputs
from mobula.actors.datasets.open_split import open_split
from mobula.actors.datasets.rows import Row, Turn, count_by_reason
from mobula.cluster.errors import DatasetError
from mobula.configs.load import load_config
from mobula.configs.schema import DataConfig
from mobula.deploy.cli import app
from mobula.deploy.data.data_command import message_record
from mobula.deploy.preflight.rows import ROWS, find_in_rows, row_notes

IMAGE_PART = {"type": "image_url", "image_url": {"url": "a.png"}}
SOUND_PART = {"type": "input_audio", "input_audio": "a.wav"}
TEXT_PART = {"type": "text", "text": "Which?"}
NO_DOWNLOADS = MediaDownloads(Path("unused"), (), DownloadLimits(1, "data.max_image_bytes", 0, 1.0))


def shared(*texts: str) -> list[dict[str, str]]:
    """Turns in the form of ShareGPT."""
    return [{"from": ("human", "gpt")[number % 2], "value": text} for number, text in enumerate(texts)]


FILES = {"image": "a.png", "video": "a.gif", "audio": "a.wav"}
ONE_VIDEO: dict[str, dict[str, Any]] = {  # the same question with the same video
    "question": {"question": "<video>Which?", "answer": 7, "video": "a.gif"},
    "messages": {
        "messages": [{"role": "user", "content": [{"type": "video", "video": "a.gif"}, TEXT_PART]}],
        "answer": "7",
    },
    "verl": {
        "prompt": [{"role": "user", "content": "<video>Which?"}],
        "videos": [{"video": "a.gif"}],
        "reward_model": {"ground_truth": "7", "style": "rule"},
    },
    "lightrft": {"prompt": "Which?", "videos": ["a.gif"], "reward_model": {"ground_truth": '["7"]'}},
    "alpaca": {"instruction": "<video>Which?", "input": "", "output": r"\boxed{7}", "answer": "7", "videos": ["a.gif"]},
    "sharegpt": {"conversations": shared("<video>Which?", r"\boxed{7}"), "answer": "7", "videos": ["a.gif"]},
}


def one(row_format: str, kind: str) -> dict[str, Any]:
    """The question of `ONE_VIDEO` with another medium."""
    return json.loads(json.dumps(ONE_VIDEO[row_format]).replace("video", kind).replace("a.gif", FILES[kind]))


ONE_IMAGE = {row_format: one(row_format, "image") for row_format in ONE_VIDEO}


def folder_of(folder: Path, *records: dict[str, Any]) -> Path:
    Image.new("L", (4, 4)).save(folder / "a.png")
    Image.new("L", (4, 4)).save(folder / "a.gif")
    return write_rows(folder, *records)


def read(folder: Path, row_format: str, *records: dict[str, Any], **changes: Any) -> list[Row]:
    return read_records(folder_of(folder), row_format, *records, **changes)


def test_the_schema_of_the_configuration_names_every_format() -> None:
    names, _ = get_args(DataConfig.model_fields["row_format"].annotation)
    assert get_args(names) == tuple(FORMATS)


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("row_format", FORMATS)
def test_every_format_gives_the_same_row(tmp_path: Path, row_format: str, kind: str) -> None:
    (tmp_path / "a.wav").write_bytes(b"sound")
    [row] = read(tmp_path, row_format, one(row_format, kind))
    assert (row.sample_id, row.question, row.answer) == ("train-1", f"<{kind}>Which?", "7")
    assert (row.solution, dict(row.metadata)) == (r"\boxed{7}", {})
    media = {"image": row.images, "video": row.videos, "audio": row.audios}
    assert media == {**dict.fromkeys(FILES, ()), kind: ((tmp_path / FILES[kind]).resolve(),)}


CONVERSATION = (Turn("system", "Be brief."), Turn("user", "1 + 1?"), Turn("assistant", "2"))
MESSAGES = [{"role": turn.role, "content": turn.text} for turn in CONVERSATION]
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "messages": {"messages": [*MESSAGES, {**MESSAGES[1], "content": "2 + 2?"}, {**MESSAGES[2], "content": "It is 4."}]},
    "alpaca": {"instruction": "2 + 2?", "output": "It is 4.", "system": "Be brief.", "history": [["1 + 1?", "2"]]},
    "sharegpt": {"system": "Be brief.", "conversations": shared("1 + 1?", "2", "2 + 2?", "It is 4.")},
}


@pytest.mark.parametrize("row_format", CONVERSATIONS)
def test_an_answered_conversation_has_its_history_and_its_solution(tmp_path: Path, row_format: str) -> None:
    [row] = read(tmp_path, row_format, CONVERSATIONS[row_format])
    assert (row.history, row.question) == (CONVERSATION, "2 + 2?")
    assert (row.solution, row.answer) == ("It is 4.", "It is 4.")
    [again] = read(tmp_path, "messages", message_record(row, {}))
    assert (again.history, again.question, again.solution) == (row.history, row.question, row.solution)


PAIRS: dict[str, dict[str, Any]] = {
    "messages": {"messages": [{"role": "user", "content": "1 + 1?"}], "chosen": "2", "rejected": "3"},
    "alpaca": {"instruction": "1 + 1?", "chosen": "2", "rejected": "3"},
    "sharegpt": {
        "conversations": shared("1 + 1?"),
        "chosen": {"from": "gpt", "value": "2"},
        "rejected": {"from": "gpt", "value": "3"},
    },
}


@pytest.mark.parametrize("row_format", PAIRS)
def test_a_preference_pair_keeps_both_responses(tmp_path: Path, row_format: str) -> None:
    [row] = read(tmp_path, row_format, PAIRS[row_format])
    assert (row.chosen, row.rejected, row.solution) == ("2", "3", "2")
    [again] = read(tmp_path, "messages", message_record(row, {}))
    assert (again.chosen, again.rejected) == ("2", "3")


def test_images_of_messages_keep_their_order_over_turns_and_parts(tmp_path: Path) -> None:
    Image.new("L", (4, 4)).save(tmp_path / "b.png")
    parts = [TEXT_PART, {"type": "image", "image": "b.png"}, TEXT_PART, IMAGE_PART]
    messages = [
        {"role": "user", "content": [IMAGE_PART, TEXT_PART]},
        {"role": "assistant", "content": "7"},
        {"role": "user", "content": parts},
    ]
    [row] = read(tmp_path, "messages", {"messages": messages, "answer": "8"})
    assert [path.name for path in row.images] == ["a.png", "b.png", "a.png"]
    assert (row.history[0].text, row.question) == ("<image>Which?", "Which?<image>Which?<image>")


def test_an_empty_image_part_stands_for_an_image_of_the_row(tmp_path: Path) -> None:
    record = {"messages": [{"role": "user", "content": [{"type": "image"}, TEXT_PART]}], "images": ["a.png"]}
    [row] = read(tmp_path, "messages", record | {"answer": "7"})
    assert (row.question, [path.name for path in row.images]) == ("<image>Which?", ["a.png"])


def test_the_data_source_of_verl_is_the_label_and_extra_info_is_metadata(tmp_path: Path) -> None:
    record = ONE_IMAGE["verl"] | {"data_source": "geo3k", "extra_info": {"split": "train", "index": 3, "id": "g3"}}
    [row] = read(tmp_path, "verl", record)
    assert row.sample_id == "g3"
    assert row.metadata == {"data_source": "geo3k", "split": "train", "index": 3, "id": "g3", "label": "geo3k"}
    several = ONE_IMAGE["verl"] | {"reward_model": {"ground_truth": ["7", "seven"]}}
    [row] = read(tmp_path, "verl", several)
    assert (row.answer, row.metadata["ground_truth"]) == ("7", ["7", "seven"])


def test_bytes_in_parquet_are_the_image(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    content = encoded(Image.new("L", (4, 4)))
    record = ONE_IMAGE["verl"] | {"images": [{"bytes": content, "path": None}], "videos": []}
    record |= {"extra_info": {"answer": None, "index": 0}}
    pq.write_table(pa.Table.from_pylist([record]), tmp_path / "train.parquet")
    [row] = read_split(tmp_path, "train", "verl").rows
    assert row.images[0].content == content
    assert str(row.images[0]) == "train.parquet:1"


@pytest.mark.parametrize(
    ("row_format", "change", "reason"),
    [
        ("messages", {"messages": []}, "missing_messages"),
        ("messages", {"messages": "Which?"}, "bad_messages"),
        ("messages", {"messages": [{"role": "user", "content": [SOUND_PART]}]}, "missing_file"),
        ("messages", {"messages": [{"role": "nurse", "content": "Which?"}]}, "bad_messages"),
        ("messages", {"messages": [{"role": "assistant", "content": "7"}]}, "bad_messages"),
        ("messages", {"messages": [{"role": "user", "content": [IMAGE_PART]}], "images": ["a.png"]}, "bad_image"),
        ("messages", {"messages": [{"role": "user", "content": "Which?"}], "answer": None}, "missing_answer"),
        ("verl", {"reward_model": None}, "missing_answer"),
        ("verl", {"images": []}, "placeholder_mismatch"),
        ("verl", {"videos": ["a.mp4"]}, "missing_file"),
        ("verl", {"videos": ["a.gif"]}, "placeholder_mismatch"),
        ("verl", {"audios": ["a.wav"]}, "missing_file"),
        ("question", {"question": "<image><video>Which?", "videos": 7}, "bad_image"),
        ("verl", {"extra_info": "text"}, "bad_extra_info"),
        ("lightrft", {"prompt": ""}, "missing_prompt"),
        ("alpaca", {"output": ""}, "missing_output"),
        ("alpaca", {"history": [["one"]]}, "bad_history"),
        ("alpaca", {"images": ["a.png", "a.png"]}, "placeholder_mismatch"),
        ("sharegpt", {"conversations": [{"from": "gpt", "value": "7"}]}, "bad_conversations"),
        ("question", {"image": 7}, "bad_image"),
    ],
)
def test_an_unusable_record_is_skipped_and_its_reason_named(
    tmp_path: Path, row_format: str, change: dict[str, Any], reason: str
) -> None:
    good = ONE_IMAGE[row_format]
    split = read_split(folder_of(tmp_path, good, good | change), row_format=row_format)
    assert count_by_reason(split.skipped) == {reason: 1}


def test_columns_are_read_under_their_names_in_the_data(tmp_path: Path) -> None:
    record = {"problem": "<image>Which?", "meta": {"truth": "7"}, "images": ["a.png"], "source": "geo", "id": 3}
    columns = {"question": "problem", "answer": "meta.truth", "image": "images", "label": "source"}
    [row] = read(tmp_path, "question", record, columns=columns)
    assert (row.question, row.answer, len(row.images)) == ("<image>Which?", "7", 1)
    assert row.metadata == {"label": "geo", "meta": {"truth": "7"}}


def test_a_column_that_the_format_does_not_have_is_refused(tmp_path: Path) -> None:
    folder_of(tmp_path, ONE_IMAGE["question"])
    with pytest.raises(
        DatasetError, match=r"data\.columns has questoin.*data\.row_format=question: it has id, question"
    ):
        open_split(data_config(tmp_path, columns={"questoin": "problem"}), "train", "label")


def test_the_label_of_a_source_is_the_label_of_all_its_rows(tmp_path: Path) -> None:
    [row] = read(tmp_path, "verl", ONE_IMAGE["verl"] | {"data_source": "geo3k"}, label="maths")
    assert row.metadata["label"] == "maths"


def test_frames_in_lists_folders_and_arrays_are_one_video(tmp_path: Path) -> None:
    folder_of(tmp_path)
    (tmp_path / "clip").mkdir()
    for name in ("b.png", "a.png", "notes.txt"):
        (tmp_path / "clip" / name).write_bytes((tmp_path / "a.png").read_bytes())
    inputs = VideoInputs(tmp_path, NO_DOWNLOADS.fetch, takes_absolute=False)
    frames = ["clip/a.png", "clip/b.png"]
    expected = (tmp_path / "clip" / "a.png", tmp_path / "clip" / "b.png")
    for value in ("clip", frames, {"video": frames}, [frames], [{"frames": frames, "fps": 8}]):
        [video] = inputs.resolve(value, "row")
        assert video.frames == expected
    assert video.frame_rate == 8
    [video] = inputs.resolve(np.zeros((3, 4, 4, 3), dtype=np.uint8), "row")
    assert len(video.frames) == 3
    assert len(inputs.resolve([frames, "a.gif", "clip"], "row")) == 3
    for value in ([[]], {"video": frames, "fps": -1}, np.zeros((4, 4)), Image.new("L", (4, 4))):
        with pytest.raises(ImageError) as found:
            inputs.resolve(value, "row")
        assert found.value.reason == "bad_video"
    with pytest.raises(ImageError, match="leads out of the data folder"):
        inputs.resolve(["../a.png"], "row")


def test_lists_of_encoded_images_are_one_video_and_lists_of_files_several(tmp_path: Path) -> None:
    folder_of(tmp_path)
    inputs = VideoInputs(tmp_path, NO_DOWNLOADS.fetch, takes_absolute=False)
    png, gif = (tmp_path / "a.png").read_bytes(), (tmp_path / "a.gif").read_bytes()
    url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    for frames in ([png, bytearray(png)], [url, url], [{"bytes": png, "path": None}] * 2, [{"path": "a.png"}, "a.png"]):
        for value in (frames, [frames], {"video": frames}):
            [video] = inputs.resolve(value, "row")
            assert len(video.frames) == 2
    for files in ([gif, gif], [{"bytes": gif, "path": None}] * 2, [f"data:video/mp4;base64,{url[22:]}"] * 2):
        assert len(inputs.resolve(files, "row")) == 2
    assert inputs.resolve({"video_url": {"url": "a.gif"}}, "row") == (tmp_path / "a.gif",)


def test_tensors_of_frames_may_be_floats_and_need_gradients(tmp_path: Path) -> None:
    inputs = VideoInputs(tmp_path, NO_DOWNLOADS.fetch, takes_absolute=False)
    frames = torch.rand(3, 3, 4, 6)  # [T, C, H, W]
    for value in (frames, frames.bfloat16(), frames.clone().requires_grad_(), [frame.numpy() for frame in frames]):
        [video] = inputs.resolve(value, "row")
        assert len(video.frames) == 3
    with pytest.raises(ImageError, match="no values that can be read"):
        inputs.resolve(torch.zeros(3, 3, 4, 6, device="meta"), "row")


@pytest.mark.parametrize(
    ("media", "question"),
    [
        ({"video": ["a.png", "a.png"]}, "<video>?"),
        ({"videos": [["a.png", "a.png"], "a.gif"]}, "<video><video>?"),
        ({"images": [["a.png", "a.png"]]}, "<image><image>?"),
        ({"images": ["a.png", ["a.png"]]}, "<image><image>?"),
        ({"images": []}, "?"),
        ({"audios": [["a.wav"], "a.wav"]}, "<audio><audio>?"),
    ],
)
def test_media_of_lightrft_in_front_of_the_question_are_counted_as_they_are_read(
    tmp_path: Path, media: dict[str, Any], question: str
) -> None:
    (tmp_path / "a.wav").write_bytes(b"sound")
    [row] = read(tmp_path, "lightrft", {"prompt": "?", "reference": "7", **media})
    assert row.question == question


@pytest.mark.parametrize(
    ("reference", "answer"),
    [("['7']", "7"), ('["7"]', "7"), (["7"], "7"), ("[7]", "7"), ("[0, 1)", "[0, 1)"), ("[a]", "[a]"), ("[[", "[[")],
)
def test_a_reference_of_lightrft_that_is_written_as_a_list_of_one_is_its_item(
    tmp_path: Path, reference: Any, answer: str
) -> None:
    [row] = read(tmp_path, "lightrft", {"prompt": "?", "reference": reference})
    assert row.answer == answer


# Fields of rows that change training are read or refused by name, others are counted; TRL's columns are read.

ASKED = {"role": "user", "content": "Q?"}
FOUR = {"role": "assistant", "content": "4"}
FIVE = {"role": "assistant", "content": "5"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add"}}
RECORDS = record_of_each_format("Q?", "4")


def row_of(folder: Path, row_format: str, record: Any, **changes: Any) -> Row:
    [row] = read_split(write_rows(folder, record), row_format=row_format, **changes).rows
    return row


def conversation_of(folder: Path, record: Any, form: str = "conversation") -> Any:
    [row] = conversation_rows(folder, record, form=form)
    return row


@pytest.mark.parametrize("row_format", RECORDS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kto_tag", False),
        ("weight", 0),
        ("loss", False),
        ("loss_multiplier", 0.5),
        ("system_prompt", "Be brief."),
        ("enable_thinking", False),
        ("rejected_response", "5"),
        ("tools_kwargs", {"x": 1}),
        ("agent_name", "tool_agent"),
        ("extra_info", {"need_tools_kwargs": True}),
    ],
)
def test_a_field_that_changes_training_elsewhere_is_refused_by_name(
    tmp_path: Path, row_format: str, field: str, value: Any
) -> None:
    record = {**RECORDS[row_format], field: value}
    name = next(iter(value)) if field == "extra_info" else field
    with pytest.raises(DatasetError, match=rf"unread_field 1.*`{name}`.*data.ignored_fields=\[{name}\]"):
        row_of(tmp_path, row_format, record)
    row = row_of(tmp_path, row_format, record, ignored_fields=(name,))
    assert (row.question, row.answer, name in row.metadata) == ("Q?", "4", False)


@pytest.mark.parametrize("row_format", RECORDS)
def test_values_that_change_nothing_are_read(tmp_path: Path, row_format: str) -> None:
    neutral = {"kto_tag": True, "weight": 1, "loss": True, "tools": [], "history": []}
    neutral |= {"agent_name": "single_turn_agent"}
    row = row_of(tmp_path, row_format, {**RECORDS[row_format], **neutral})
    assert (row.answer, row.template, row.unread) == ("4", "", ())


@pytest.mark.parametrize("row_format", RECORDS)
def test_the_columns_of_a_chat_template_are_kept_for_it(tmp_path: Path, row_format: str) -> None:
    columns = {"tools": json.dumps([TOOL["function"]]), "chat_template_kwargs": {"x": 0.50}, "system": "S", "level": 3}
    row = row_of(tmp_path, row_format, {**RECORDS[row_format], **columns})
    assert json.loads(row.template) == {"tools": [TOOL], "chat_template_kwargs": {"x": 0.5}}
    assert row.history == (Turn("system", "S"),)
    assert row.unread == ("level",)
    assert "tools" not in row.metadata and row.metadata["level"] == 3


@pytest.mark.parametrize("row_format", ["messages", "alpaca", "sharegpt"])
@pytest.mark.parametrize("change", [{"label": False}, {"margin": 0.5}, {"objects": {"ref": ["a"]}}, {"mask": "User"}])
def test_demonstrations_have_further_fields_that_are_refused(tmp_path: Path, row_format: str, change: Any) -> None:
    with pytest.raises(DatasetError, match="unread_field 1"):
        row_of(tmp_path, row_format, {**RECORDS[row_format], **change})
    with pytest.raises(DatasetError, match="which is not read here"):
        conversation_of(tmp_path, {**RECORDS["messages"], **change})


@pytest.mark.parametrize(
    ("turn", "name"),
    [
        ({**ASKED, "images": ["a.png"]}, "images"),
        ({**FOUR, "prefix": True}, "prefix"),
        ({**FOUR, "partial": True}, "partial"),
        ({**FOUR, "train_detail": [1]}, "train_detail"),
        ({**FOUR, "mask": True}, "mask"),
        ({**FOUR, "function_call": {"name": "f"}}, "function_call"),
        ({**ASKED, "content": [{"type": "text", "text": "Q?", "loss": False}]}, "loss"),
        ({**ASKED, "content": [{"type": "image", "image": "a.png", "max_pixels": 9}]}, "max_pixels"),
        ({**ASKED, "content": [{"type": "video", "video": "a.mp4", "fps": 9}]}, "fps"),
    ],
)
def test_fields_of_turns_and_parts_are_refused_by_name(tmp_path: Path, turn: Any, name: str) -> None:
    turns = [turn, FOUR] if turn["role"] == "user" else [ASKED, turn]
    for read in (lambda r: row_of(tmp_path, "messages", r), lambda r: conversation_of(tmp_path, r)):
        with pytest.raises(DatasetError, match=rf"`{name}`.*not read here"):
            read({"messages": turns})


@pytest.mark.parametrize("field", ["weight", "loss", "train", "train_on_turn", "loss_mask"])
def test_turns_out_of_the_loss_are_not_trained(tmp_path: Path, field: str) -> None:
    turns = [ASKED, {**FIVE, field: 0}, ASKED, {**FOUR, field: True}]
    row = conversation_of(tmp_path, {"messages": turns})
    assert [turn.is_trained for turn in row.endings[0].turns] == [False, False, True]
    with pytest.raises(DatasetError, match=f"{field} 0.5: write 0 or 1"):
        conversation_of(tmp_path, {"messages": [ASKED, {**FOUR, field: 0.5}]})
    history = row_of(tmp_path, "messages", {"messages": turns}).history
    assert [turn.is_trained for turn in history] == [False, False]
    with pytest.raises(DatasetError, match="the answer in `messages` has `weight`"):
        row_of(tmp_path, "messages", {"messages": [ASKED, {**FOUR, field: 0}]})


def test_tool_calls_and_thoughts_are_fields_of_their_turns(tmp_path: Path) -> None:
    spoken = {**CALL, "function": {"name": "add", "arguments": '{"a": 1}'}}
    called = {"role": "assistant", "content": None, "tool_calls": [spoken], "reasoning_content": "because"}
    turns = [ASKED, called, {"role": "tool", "content": "2", "name": "add"}, FOUR]
    fields = [{"tool_calls": [CALL], "reasoning_content": "because"}, {"name": "add"}, {}]
    row = conversation_of(tmp_path, {"messages": turns})
    assert [(turn.role, dict(turn.fields)) for turn in row.endings[0].turns] == list(
        zip(("assistant", "tool", "assistant"), fields, strict=True)
    )
    shared = [{"from": "human", "value": "Q?"}, {"from": "function_call", "value": json.dumps(CALL["function"])}]
    shared += [{"from": "observation", "value": "2"}, {"from": "human", "value": "And?"}]
    history = row_of(tmp_path, "sharegpt", {"conversations": shared, "answer": "4"}).history
    assert [dict(turn.fields) for turn in history] == [{}, {"tool_calls": [CALL]}, {}]
    with pytest.raises(DatasetError, match="the answer in `messages` has `reasoning_content`"):
        row_of(tmp_path, "messages", {"messages": [ASKED, {**FOUR, "reasoning_content": "because"}]})


BEGUN = [ASKED, FIVE, ASKED]
TRLS: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("conversation", {"prompt": "Q?", "completion": "4"}, ["Q?"], ["4"]),
    ("conversation", {"prompt": [ASKED], "completion": [FOUR]}, ["Q?"], ["4"]),
    ("pair", {"prompt": "Q?", "chosen": "4", "rejected": "5"}, ["Q?"], ["4", "5"]),
    ("pair", {"prompt": [ASKED], "chosen": [FOUR], "rejected": [FIVE]}, ["Q?"], ["4", "5"]),
    ("pair", {"chosen": [ASKED, FOUR], "rejected": [ASKED, FIVE]}, ["Q?"], ["4", "5"]),
    ("pair", {"prompt": "Q?", "chosen": [ASKED, FOUR], "rejected": [ASKED, FIVE]}, ["Q?"], ["4", "5"]),
    ("pair", {"chosen": [*BEGUN, FOUR], "rejected": [*BEGUN, FIVE]}, ["Q?", "5", "Q?"], ["4", "5"]),
]


@pytest.mark.parametrize(("form", "record", "context", "answers"), TRLS)
def test_trls_columns_are_read(
    tmp_path: Path, form: str, record: dict[str, Any], context: list[str], answers: list[str]
) -> None:
    row = conversation_of(tmp_path, record, form)
    assert [turn.text for turn in row.context] == context
    assert [ending.turns[0].text for ending in row.endings] == answers
    read = row_of(tmp_path, "messages", {**record, "answer": "4"})
    assert [*(turn.text for turn in read.history), read.question] == context
    assert [read.chosen, read.rejected] == answers if form == "pair" else read.solution == "4"


def test_rows_that_cannot_be_read_name_the_next_action(tmp_path: Path) -> None:
    for record, said in (
        ({"text": "The sky is blue."}, "write `messages`, or `prompt` and `completion`"),
        ({"chosen": [ASKED, FOUR], "rejected": [ASKED, FIVE], "prompt": "Else?"}, "do not begin with the prompt"),
        ({"prompt": "Q?", "completion": "5", "label": False}, "trained by `mobula kto` alone"),
    ):
        with pytest.raises(DatasetError, match=said):
            conversation_of(tmp_path, record, "pair" if "chosen" in record else "conversation")


def converted(folder: Path, *words: str) -> Sequence[Any]:
    """The rows of an offline job that `mobula data convert` makes of the folder's."""
    run = ["data", "convert", str(folder / "out"), "--split", "train", *words, f"data.path={folder}"]
    result = CliRunner().invoke(app, run)
    assert result.exit_code == 0, result.output
    return read_conversations(folder / "out", "train", "conversation").rows


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (RECORDS["sharegpt"], ["data=sharegpt"]),
        (RECORDS["alpaca"], ["data=alpaca"]),
        (RECORDS["question"], ["data=jsonl", "data.columns={answer: answer, solution: answer}"]),
        (
            {"query": "Q?", "response": "4"},
            ["data=jsonl", "data.columns={question: query, answer: response, solution: response}"],
        ),
    ],
)
def test_the_words_that_an_error_names_convert_the_rows(tmp_path: Path, record: Any, words: list[str]) -> None:
    with pytest.raises(DatasetError) as caught:
        conversation_of(tmp_path, record)
    assert all(word in str(caught.value) for word in words)
    [row] = converted(tmp_path, *words)
    assert [turn.text for turn in (*row.context, *row.endings[0].turns)] == ["Q?", "4"]


def test_a_converted_row_keeps_its_fields(tmp_path: Path) -> None:
    turns = [ASKED, {**FIVE, "weight": 0}, ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    turns += [{"role": "tool", "content": "2"}, ASKED, FOUR]
    [before] = conversation_rows(tmp_path, {"messages": turns, "tools": [TOOL]})
    [after] = converted(tmp_path, "data=messages")
    assert (after.context, after.endings, after.template) == (before.context, before.endings, before.template)


@pytest.mark.parametrize("row_format", ["question", "alpaca", "verl", "lightrft"])
def test_the_line_with_four_marks_is_the_answer(tmp_path: Path, row_format: str) -> None:
    worked = "48/2 = <<48/2=24>>24\n#### 24"
    column = {"question": "answer", "alpaca": "output", "lightrft": "reference"}.get(row_format)
    change = {column: worked} if column else {"reward_model": {"ground_truth": worked}}
    row = row_of(tmp_path, row_format, {**RECORDS[row_format], **change})
    assert row.answer == "24"
    assert row.solution == (worked if row_format == "alpaca" else "48/2 = <<48/2=24>>24\n\\boxed{24}")
    heading = row_of(tmp_path, row_format, RECORDS[row_format] | {"id": "#### 24"})
    assert heading.answer == "4"


def test_fields_and_references_out_of_reach_are_counted_once() -> None:
    config = load_config(["experiment=own", "policy.model=x", "data.path=x"])
    out_of_reach = ["He sells 4.\nThat is 4.", "x" * 201, '["Paris", "paris"]']
    in_reach = ["4", r"\boxed{4}" + "x" * 300, "\\begin{pmatrix}1\n2\\end{pmatrix}", "[1, 2]"]
    rows = [Row(str(n), "Q?", answer, "", unread=("level",)) for n, answer in enumerate([*out_of_reach, *in_reach])]
    notes: dict[str, int] = {}
    for row in rows:
        for note in row_notes(config, row):
            notes[note] = notes.get(note, 0) + 1
    assert notes[ROWS] == 7
    references, fields = map(str, find_in_rows(config, {"train": notes, "validation": {ROWS: 2, "field level": 2}}))
    assert references.startswith("3 of 7 references of train are longer than 200 characters")
    assert "level (9 rows)" in fields


def test_an_unknown_field_of_an_offline_row_is_counted(tmp_path: Path) -> None:
    row = conversation_of(tmp_path, {"messages": [{**ASKED, "foo": 1}, FOUR], "source": "web", "answer": "4"})
    assert row.unread == ("source", "messages.foo")
    with pytest.raises(DatasetError):
        conversation_rows(tmp_path, {"messages": [ASKED, FOUR], "kto_tag": False}, "", "")
    read = read_conversations(tmp_path, "train", "conversation", ignored=("kto_tag",))
    assert count_by_reason(read.skipped) == {} and len(read.rows) == 1
