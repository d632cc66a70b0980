"""Row formats: the same question read from every schema, what each keeps beside it, and what is refused."""

from __future__ import annotations

import base64
import json
from io import BytesIO
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from data_rows import data_config, read_split
from PIL import Image

from mobula.actors.datasets.clips import DownloadLimits, MediaDownloads, VideoInputs
from mobula.actors.datasets.formats.records import FORMATS
from mobula.actors.datasets.images import ImageError
from mobula.actors.datasets.open_split import open_split
from mobula.actors.datasets.rows import Row, Turn, count_by_reason
from mobula.cluster.errors import DatasetError
from mobula.configs.schema import DataConfig
from mobula.deploy.data.convert import message_record

IMAGE_PART = {"type": "image_url", "image_url": {"url": "a.png"}}
TEXT_PART = {"type": "text", "text": "Which?"}
NO_DOWNLOADS = MediaDownloads(Path("unused"), (), DownloadLimits(1, "data.max_image_bytes", 0, 1.0))
ONE_IMAGE: dict[str, dict[str, Any]] = {  # the same question with the same image
    "question": {"question": "<image>Which?", "answer": 7, "image": "a.png"},
    "messages": {"messages": [{"role": "user", "content": [IMAGE_PART, TEXT_PART]}], "answer": "7"},
    "verl": {
        "prompt": [{"role": "user", "content": "<image>Which?"}],
        "images": [{"path": "a.png", "bytes": None}],
        "reward_model": {"ground_truth": "7", "style": "rule"},
    },
    "lightrft": {"prompt": "Which?", "images": ["a.png"], "reward_model": {"ground_truth": '["7"]'}},
    "alpaca": {"instruction": "<image>Which?", "input": "", "output": r"\boxed{7}", "answer": "7", "images": ["a.png"]},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "<image>Which?"}, {"from": "gpt", "value": r"\boxed{7}"}],
        "answer": "7",
        "images": "a.png",
    },
}


def folder_of(folder: Path, *records: dict[str, Any]) -> Path:
    Image.new("L", (4, 4)).save(folder / "a.png")
    Image.new("L", (4, 4)).save(folder / "a.gif")
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def read(folder: Path, row_format: str, *records: dict[str, Any], **changes: Any) -> list[Row]:
    split = read_split(folder_of(folder, *records), row_format=row_format, **changes)
    assert split.skipped == ()
    return list(split.rows)


def reasons(folder: Path, row_format: str, record: dict[str, Any]) -> dict[str, int]:
    good = ONE_IMAGE[row_format]
    return count_by_reason(read_split(folder_of(folder, good, record), row_format=row_format).skipped)


def test_the_schema_of_the_configuration_names_every_format() -> None:
    names, _ = get_args(DataConfig.model_fields["row_format"].annotation)
    assert get_args(names) == tuple(FORMATS)


@pytest.mark.parametrize("row_format", FORMATS)
def test_every_format_gives_the_same_row(tmp_path: Path, row_format: str) -> None:
    [row] = read(tmp_path, row_format, ONE_IMAGE[row_format])
    assert row == Row("train-1", "<image>Which?", "7", r"\boxed{7}", ((tmp_path / "a.png").resolve(),), row.metadata)
    assert not row.metadata


CONVERSATION = (Turn("system", "Be brief."), Turn("user", "1 + 1?"), Turn("assistant", "2"))
MESSAGES = [{"role": turn.role, "content": turn.text} for turn in CONVERSATION]
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "messages": {
        "messages": [*MESSAGES, {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "It is 4."}]
    },
    "alpaca": {
        "instruction": "2 + 2?",
        "output": "It is 4.",
        "system": "Be brief.",
        "history": [["1 + 1?", "2"]],
    },
    "sharegpt": {
        "system": "Be brief.",
        "conversations": [
            {"from": "human", "value": "1 + 1?"},
            {"from": "gpt", "value": "2"},
            {"from": "human", "value": "2 + 2?"},
            {"from": "gpt", "value": "It is 4."},
        ],
    },
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
        "conversations": [{"from": "human", "value": "1 + 1?"}],
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
    content = BytesIO()
    Image.new("L", (4, 4)).save(content, format="PNG")
    record = ONE_IMAGE["verl"] | {"images": [{"bytes": content.getvalue(), "path": None}], "videos": []}
    pq.write_table(
        pa.Table.from_pylist([record | {"extra_info": {"answer": None, "index": 0}}]), tmp_path / "train.parquet"
    )
    [row] = read_split(tmp_path, "train", "verl").rows
    assert row.images[0].content == content.getvalue()
    assert str(row.images[0]) == "train.parquet:1"


@pytest.mark.parametrize(
    ("row_format", "change", "reason"),
    [
        ("messages", {"messages": []}, "missing_messages"),
        ("messages", {"messages": "Which?"}, "bad_messages"),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": "a.wav"}]}]},
            "missing_file",
        ),
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
    assert reasons(tmp_path, row_format, ONE_IMAGE[row_format] | change) == {reason: 1}


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


VIDEO_PART = {"type": "video", "video": "a.gif"}
ONE_VIDEO: dict[str, dict[str, Any]] = {  # the same question with the same video
    "question": {"question": "<video>Which?", "answer": 7, "video": "a.gif"},
    "messages": {"messages": [{"role": "user", "content": [VIDEO_PART, TEXT_PART]}], "answer": "7"},
    "verl": {
        "prompt": [{"role": "user", "content": "<video>Which?"}],
        "videos": [{"video": "a.gif"}],
        "reward_model": {"ground_truth": "7", "style": "rule"},
    },
    "lightrft": {"prompt": "Which?", "videos": ["a.gif"], "reference": "7"},
    "alpaca": {"instruction": "<video>Which?", "input": "", "output": r"\boxed{7}", "answer": "7", "videos": ["a.gif"]},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "<video>Which?"}, {"from": "gpt", "value": r"\boxed{7}"}],
        "answer": "7",
        "videos": ["a.gif"],
    },
}


@pytest.mark.parametrize("row_format", FORMATS)
def test_every_format_has_videos(tmp_path: Path, row_format: str) -> None:
    [row] = read(tmp_path, row_format, ONE_VIDEO[row_format])
    assert (row.question, row.answer, row.images) == ("<video>Which?", "7", ())
    assert row.videos == (tmp_path / "a.gif",)


@pytest.mark.parametrize("row_format", FORMATS)
def test_every_format_has_sounds(tmp_path: Path, row_format: str) -> None:
    (tmp_path / "a.wav").write_bytes(b"sound")
    record = json.loads(json.dumps(ONE_VIDEO[row_format]).replace("video", "audio").replace("a.gif", "a.wav"))
    [row] = read(tmp_path, row_format, record)
    assert (row.question, row.answer, row.videos) == ("<audio>Which?", "7", ())
    assert row.audios == (tmp_path / "a.wav",)


def test_frames_in_lists_folders_and_arrays_are_one_video(tmp_path: Path) -> None:
    folder_of(tmp_path)
    (tmp_path / "clip").mkdir()
    for name in ("b.png", "a.png", "notes.txt"):
        (tmp_path / "clip" / name).write_bytes((tmp_path / "a.png").read_bytes())
    inputs = VideoInputs(tmp_path, NO_DOWNLOADS, takes_absolute=False)
    frames = ["clip/a.png", "clip/b.png"]
    expected = (tmp_path / "clip" / "a.png", tmp_path / "clip" / "b.png")
    for value in ("clip", frames, {"video": frames}, [frames], [{"frames": frames, "fps": 8}]):
        [video] = inputs.resolve_videos(value, "row")
        assert video.frames == expected
    assert video.frame_rate == 8
    [video] = inputs.resolve_videos(np.zeros((3, 4, 4, 3), dtype=np.uint8), "row")
    assert len(video.frames) == 3
    assert len(inputs.resolve_videos([frames, "a.gif", "clip"], "row")) == 3
    for value in ([[]], {"video": frames, "fps": -1}, np.zeros((4, 4)), Image.new("L", (4, 4))):
        with pytest.raises(ImageError) as found:
            inputs.resolve_videos(value, "row")
        assert found.value.reason == "bad_video"
    with pytest.raises(ImageError, match="leads out of the data folder"):
        inputs.resolve_videos(["../a.png"], "row")


def test_lists_of_encoded_images_are_one_video_and_lists_of_files_several(tmp_path: Path) -> None:
    folder_of(tmp_path)
    inputs = VideoInputs(tmp_path, NO_DOWNLOADS, takes_absolute=False)
    png, gif = (tmp_path / "a.png").read_bytes(), (tmp_path / "a.gif").read_bytes()
    url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    for frames in ([png, bytearray(png)], [url, url], [{"bytes": png, "path": None}] * 2, [{"path": "a.png"}, "a.png"]):
        for value in (frames, [frames], {"video": frames}):
            [video] = inputs.resolve_videos(value, "row")
            assert len(video.frames) == 2
    for files in ([gif, gif], [{"bytes": gif, "path": None}] * 2, [f"data:video/mp4;base64,{url[22:]}"] * 2):
        assert len(inputs.resolve_videos(files, "row")) == 2
    assert inputs.resolve_videos({"video_url": {"url": "a.gif"}}, "row") == (tmp_path / "a.gif",)


def test_tensors_of_frames_may_be_floats_and_need_gradients(tmp_path: Path) -> None:
    inputs = VideoInputs(tmp_path, NO_DOWNLOADS, takes_absolute=False)
    frames = torch.rand(3, 3, 4, 6)  # [T, C, H, W]
    for value in (frames, frames.bfloat16(), frames.clone().requires_grad_(), [frame.numpy() for frame in frames]):
        [video] = inputs.resolve_videos(value, "row")
        assert len(video.frames) == 3
    with pytest.raises(ImageError, match="no values that can be read"):
        inputs.resolve_videos(torch.zeros(3, 3, 4, 6, device="meta"), "row")


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
