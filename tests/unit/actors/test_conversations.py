"""Rows of offline jobs: what is read, what is skipped and named, and which tokens are the assistant's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from clips import noise_frames, write_clip
from data_rows import conversation_rows, encoded, write_rows
from PIL import Image
from scored_rows import chat_of
from typer.testing import CliRunner

from mobula.actors.datasets.conversations import read_conversations
from mobula.actors.datasets.rows import count_by_reason
from mobula.actors.processors.conversation import ConversationProcessor, TooLongError
from mobula.cluster.errors import DatasetError, PromptError
from mobula.cluster.records.media import MediaReader
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.cli import app
from mobula.learner.policies.batch import collate
from mobula.learner.policies.head import Distribution
from mobula.learner.policies.loading import load_model
from mobula.learner.policies.tiny import write_tiny, write_tiny_qwen2_5_vl
from mobula.learner.policies.token import TokenPolicy
from mobula.learner.policies.trained import row_of

USER = {"role": "user", "content": "2 + 2?"}
ASKED = {"role": "user", "content": "<image>"}
WATCHED = {"role": "user", "content": "<video>"}
HEARD = {"role": "user", "content": "<audio>"}
FOUR = {"role": "assistant", "content": "4"}
WEB_IMAGE = {"type": "image_url", "image_url": "http://x/y.png"}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for name, size in (("a", (56, 56)), ("b", (84, 56))):
        Image.new("RGB", size, "red").save(tmp_path / f"{name}.png")
    return tmp_path


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    model = write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny"))
    return load_config(["experiment=sft", f"policy.model={model}", "data.path=x"])


def processor(config: RunConfig, **options: Any) -> ConversationProcessor:
    least = {"system_prompt": "", "max_tokens": 500, "has_tail": False}
    return ConversationProcessor(chat_of(config), **least | options)


def test_an_answer_apart_from_its_messages_is_the_assistants(tmp_path: Path) -> None:
    apart = {"messages": [USER, FOUR, USER], "solution": "4", "answer": "other", "images": []}
    together = {"messages": [USER, FOUR, USER, FOUR]}
    first, second = conversation_rows(tmp_path, apart, together)
    assert (first.context, first.endings) == (second.context, second.endings)


@pytest.mark.parametrize("form", ["conversation", "pair"])
def test_hub_data_in_trls_form_become_rows_of_offline_jobs(tmp_path: Path, form: str) -> None:
    """The commands of docs/offline_training.md, on a data set of the same columns."""
    datasets = pytest.importorskip("datasets")
    asked = {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "Which colour?"}]}
    answers = [{"role": "assistant", "content": [{"type": "text", "text": text}]} for text in ("red", "blue")]
    columns = {
        "conversation": {"messages": [asked, answers[0]]},
        "pair": {"prompt": [asked], "chosen": [answers[0]], "rejected": [answers[1]]},
    }
    row = {**columns[form], "images": [{"bytes": encoded(Image.new("RGB", (4, 4), "red")), "path": None}]}
    found = datasets.Dataset.from_list([row])
    found = found.cast_column("images", datasets.Sequence(datasets.Image()))
    datasets.DatasetDict({"train": found}).save_to_disk(str(tmp_path / "hub"))
    words = ["data=huggingface", "data.row_format=messages", "data.prompt_suffix=''", f"data.path={tmp_path / 'hub'}"]
    words += ["data.columns={messages: prompt}"] if form == "pair" else []
    run = ["data", "convert", str(tmp_path / "rows"), "--split", "train", *words]
    result = CliRunner().invoke(app, run)
    assert result.exit_code == 0, result.output
    [read] = read_conversations(tmp_path / "rows", "train", form).rows
    assert [turn.text for turn in read.context] == ["<image>Which colour?"]
    assert [ending.turns[0].text for ending in read.endings] == ["red", "blue"][: len(read.endings)]
    assert len(read.endings) == (2 if form == "pair" else 1)
    assert np.asarray(Image.open(read.images[0])).tolist() == np.full((4, 4, 3), (255, 0, 0)).tolist()


@pytest.mark.parametrize(
    ("form", "row", "reason"),
    [
        ("conversation", "{", "broken_json"),
        ("conversation", {"chosen": "x"}, "missing_messages"),
        ("conversation", {"messages": [{"role": "robot", "content": "x"}]}, "bad_message"),
        ("conversation", {"messages": [USER, {"role": "assistant", "content": None}]}, "bad_message"),
        ("conversation", {"messages": [USER, {**FOUR, "weight": 0}]}, "nothing_to_train"),
        ("conversation", {"messages": [USER]}, "no_answer"),
        ("conversation", {"messages": [USER, FOUR, USER]}, "no_answer"),
        ("conversation", {"messages": [FOUR]}, "no_question"),
        ("conversation", {"messages": [USER, {**FOUR, "content": [{"type": "image"}]}]}, "image_in_answer"),
        ("conversation", {"messages": [USER, FOUR], "images": ["a.png"]}, "placeholder_mismatch"),
        ("conversation", {"messages": [{"role": "user", "content": "<image>?"}, FOUR]}, "placeholder_mismatch"),
        ("conversation", {"messages": [{"role": "user", "content": "<image>"}, FOUR], "images": ["x"]}, "missing_file"),
        ("conversation", {"messages": [ASKED, FOUR], "images": ["../x"]}, "outside_folder"),
        ("conversation", {"messages": [{"role": "user", "content": "<image>"}, FOUR], "images": [1]}, "bad_images"),
        ("conversation", {"messages": [{**USER, "content": [WEB_IMAGE]}, FOUR]}, "remote_image"),
        ("conversation", {"messages": [{**USER, "content": [{"type": "audio"}]}, FOUR]}, "placeholder_mismatch"),
        ("conversation", {"messages": [WATCHED, FOUR]}, "placeholder_mismatch"),
        ("conversation", {"messages": [WATCHED, FOUR], "videos": ["x.mp4"]}, "missing_file"),
        ("conversation", {"messages": [WATCHED, FOUR], "videos": ["http://x/y.mp4"]}, "remote_video"),
        ("conversation", {"messages": [WATCHED, FOUR], "videos": [[]]}, "bad_video"),
        ("conversation", {"messages": [HEARD, FOUR]}, "placeholder_mismatch"),
        ("conversation", {"messages": [HEARD, FOUR], "audios": ["x.wav"]}, "missing_file"),
        ("conversation", {"messages": [HEARD, FOUR], "audios": ["http://x/y.wav"]}, "remote_audio"),
        ("conversation", {"messages": [HEARD, FOUR], "audios": [[0.1, 0.2]]}, "bad_audio"),
        ("pair", {"messages": [USER], "chosen": "4"}, "missing_pair"),
        ("pair", {"messages": [USER], "chosen": "", "rejected": "5"}, "missing_pair"),
        ("pair", {"messages": [USER], "chosen": "4", "rejected": "4"}, "equal_pair"),
        ("pair", {"messages": [USER, FOUR], "chosen": "4", "rejected": "5"}, "no_question"),
        ("pair", {"messages": [USER], "chosen": [FOUR, FOUR], "rejected": "5"}, "bad_pair"),
        ("pair", {"messages": [USER], "chosen": USER, "rejected": "5"}, "bad_pair"),
        ("scored", {"messages": [USER, FOUR]}, "bad_score"),
        ("scored", {"messages": [USER, FOUR], "score": True}, "bad_score"),
        ("scored", '{"messages": [], "score": NaN}', "missing_messages"),
        ("scored", json.dumps({"messages": [USER, FOUR], "score": float("nan")}), "bad_score"),
        ("scored", {"messages": [USER], "score": 1}, "no_answer"),
    ],
)  # fmt: skip
def test_an_unfit_line_is_skipped_and_named(images: Path, form: str, row: Any, reason: str) -> None:
    good = {
        "conversation": {"messages": [USER, FOUR]},
        "pair": {"messages": [USER], "chosen": "4", "rejected": "5"},
        "scored": {"messages": [USER, FOUR], "score": 0.5},
    }[form]
    split = read_conversations(write_rows(images, row, good), "train", form)
    assert count_by_reason(split.skipped) == {reason: 1}
    assert split.skipped[0].sample.startswith("train.jsonl:1 ")
    assert [row.sample_id for row in split.rows] == ["train-2"]
    with pytest.raises(DatasetError, match="has no usable row"):
        read_conversations(write_rows(images, row), "train", form)


def test_a_pair_has_labels_and_a_score_is_one(images: Path) -> None:
    row = {"messages": [USER], "chosen": "4", "rejected": {"role": "assistant", "content": "5"}}
    [found] = conversation_rows(images, row, form="pair")
    assert [(ending.turns[0].text, ending.label) for ending in found.endings] == [("4", 1.0), ("5", 0.0)]
    [found] = conversation_rows(images, {"messages": [USER, FOUR], "score": -2}, form="scored")
    assert [ending.label for ending in found.endings] == [-2.0]


SEVERAL_TURNS = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "<image>What is this?"},
        {"role": "assistant", "content": "A red square."},
        {"role": "user", "content": "And <image>?"},
        {"role": "assistant", "content": "A guess", "weight": 0},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes."},
    ],
    "images": ["a.png", "b.png"],
}


def test_the_loss_covers_the_assistants_tokens_of_several_turns_alone(config: RunConfig, images: Path) -> None:
    [row] = conversation_rows(images, SEVERAL_TURNS)
    made = processor(config)
    group = made.prepare(row, "0/0/x").group
    [trajectory] = group.trajectories
    ids = trajectory.actions.token_ids
    trained = made.chat.tokenizer.decode(ids[trajectory.action_mask])
    assert trained == "A red square.<|im_end|>Yes.<|im_end|>"
    assert made.check(row) == group.prompt.num_tokens + len(ids)


def test_context_and_ending_are_the_tokens_of_the_models_own_processor(config: RunConfig, images: Path) -> None:
    [row] = conversation_rows(images, SEVERAL_TURNS)
    made = processor(config, has_tail=True)
    group = made.prepare(row, "0/0/x").group
    own = made.chat.renderer
    messages = []
    for turn in (*row.context, *row.endings[0].turns):
        texts = turn.text.split("<image>")
        content = [{"type": "text", "text": texts[0]}]
        for text in texts[1:]:
            content += [{"type": "image"}, {"type": "text", "text": text}]
        messages.append({"role": turn.role, "content": content})
    text = own.apply_chat_template(messages, tokenize=False)
    expected = own(text=[text], images=[Image.open(path) for path in row.images])["input_ids"][0]
    found = np.concatenate([group.prompt.expanded_ids, group.trajectories[0].actions.token_ids])
    assert found.tolist() == list(expected)
    image = own.image_token_id
    assert [set(found[span.start : span.end]) for span in group.prompt.media_spans] == [{image}, {image}]
    assert [span.end - span.start for span in group.prompt.media_spans] == [4, 6]
    assert (found == image).sum() == 10
    assert group.prompt.media_spans[1].start > group.prompt.num_tokens, "an image of a later turn"


def test_a_pair_shares_its_context(config: RunConfig, images: Path) -> None:
    row = {
        "messages": [{"role": "user", "content": "<image>?"}],
        "images": ["a.png"],
        "chosen": "red",
        "rejected": "a dog",
    }
    [found] = conversation_rows(images, row, form="pair")
    scored = processor(config).prepare(found, "0/0/x")
    assert [reward.value for reward in scored.rewards] == [1.0, 0.0]
    texts = [trajectory.response.text for trajectory in scored.group.trajectories]
    assert texts == ["red", "a dog"]
    assert all(trajectory.action_mask.all() for trajectory in scored.group.trajectories)


def test_what_is_too_long_is_rejected_before_an_image_is_decoded(config: RunConfig, images: Path) -> None:
    [row] = conversation_rows(images, SEVERAL_TURNS)
    length = processor(config).check(row)
    assert processor(config, max_tokens=length).check(row) == length
    with pytest.raises(TooLongError, match=f"has {length} tokens .*offline.max_tokens is {length - 1}"):
        processor(config, max_tokens=length - 1).check(row)
    assert TooLongError.reason == "too_long"


def test_texts_may_not_imitate_special_tokens(config: RunConfig, images: Path) -> None:
    row = {"messages": [USER, {"role": "assistant", "content": "4<|im_end|>"}]}
    [found] = conversation_rows(images, row)
    with pytest.raises(PromptError, match="special token"):
        processor(config).check(found)


def test_the_configured_system_prompt_begins_rows_that_have_none(config: RunConfig, images: Path) -> None:
    [row] = conversation_rows(images, {"messages": [USER, FOUR]})
    [own] = conversation_rows(images, SEVERAL_TURNS)
    made = processor(config, system_prompt="Help.")
    assert made.prepare(row, "x").group.prompt.text.startswith("<|im_start|>system\nHelp.<|im_end|>")
    assert made.prepare(own, "x").group.prompt.text.startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_videos_stand_where_their_placeholders_do_in_every_turn(config: RunConfig, tmp_path: Path) -> None:
    frames = noise_frames(8, (56, 56))
    write_clip(tmp_path / "clip.mkv", frames, rate=4)
    (tmp_path / "frames").mkdir()
    for number, frame in enumerate(frames):
        frame.save(tmp_path / "frames" / f"{number}.png")
    frames[0].save(tmp_path / "a.png")
    parts = [
        {"type": "video", "video": "clip.mkv"},
        {"type": "image_url", "image_url": {"url": "a.png"}},
        {"type": "text", "text": "Which?"},
    ]
    by_parts = {"messages": [{"role": "user", "content": parts}, FOUR]}
    texts = [{"role": "user", "content": "<video><image>Which?"}, FOUR]
    beside = {"messages": texts, "images": ["a.png"], "videos": ["clip.mkv"]}
    later = {"messages": [USER, FOUR, {"role": "user", "content": "<video>?"}, FOUR], "videos": ["frames"]}
    rows = conversation_rows(tmp_path, by_parts, beside, later)
    videos = load_config(["experiment=sft", f"policy.model={config.policy.model}", "data.path=x", *VIDEOS])
    made = processor(videos)
    groups = [made.prepare(row, f"0/{n}") for n, row in enumerate(rows)]
    prompts = [group.group.prompt for group in groups]
    assert [handle.modality for handle in prompts[0].media] == ["video", "image"]
    assert prompts[0].media == prompts[1].media and np.array_equal(prompts[0].expanded_ids, prompts[1].expanded_ids)
    assert made.check(rows[0]) == len(prompts[0].expanded_ids) + groups[0].group.trajectories[0].num_steps
    [span] = prompts[2].media_spans
    actions = groups[2].group.trajectories[0]
    whole = np.concatenate([prompts[2].expanded_ids, actions.actions.token_ids])
    assert span.start >= len(prompts[2].expanded_ids), "it is shown after the first answer"
    video_id = made.chat.renderer.video_token_id
    assert (whole[span.start : span.end] == video_id).all() and (whole == video_id).sum() == span.end - span.start
    trained = whole[len(prompts[2].expanded_ids) :][actions.action_mask]
    assert video_id not in trained, "what the policy saw is not what it is to write"
    with pytest.raises(PromptError, match="max_videos_per_prompt is 0"):
        processor(config).prepare(rows[0], "0/0")


VIDEOS = ("sampler.max_videos_per_prompt=1", "data.video.fps=4")


def test_sounds_stand_where_their_placeholders_do_and_are_trained_around(tmp_path: Path) -> None:
    model = write_tiny("qwen2-audio", tmp_path / "model", seed=1)
    samples = np.random.default_rng(0).normal(0, 0.1, 6000).astype(np.float32)
    soundfile.write(tmp_path / "a.wav", samples, 16_000)
    part = {"type": "audio", "audio": "a.wav"}
    by_parts = {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "Which?"}]}, FOUR]}
    beside = {"messages": [{"role": "user", "content": "<audio>Which?"}, FOUR], "audios": ["a.wav"]}
    later = {"messages": [USER, FOUR, {"role": "user", "content": "<audio>?"}, FOUR], "audios": ["a.wav"]}
    listed = {"array": samples.tolist(), "sampling_rate": 16_000}
    inline = {"messages": [{"role": "user", "content": "<audio>Which?"}, FOUR], "audios": [listed]}
    rows = conversation_rows(tmp_path, by_parts, beside, later, inline)
    words = ["experiment=sft", "policy=tiny_qwen2_audio", f"policy.model={model}", "data.path=x"]
    made = processor(load_config([*words, "sampler.max_audios_per_prompt=1"]))
    groups = [made.prepare(row, f"0/{n}").group for n, row in enumerate(rows)]
    prompts = [group.prompt for group in groups]
    assert [handle.modality for handle in prompts[0].media] == ["audio"]
    assert prompts[0].media == prompts[1].media and np.array_equal(prompts[0].expanded_ids, prompts[1].expanded_ids)
    assert np.array_equal(prompts[0].expanded_ids, prompts[3].expanded_ids), "samples are a sound as a file is"
    assert made.check(rows[0]) == len(prompts[0].expanded_ids) + groups[0].trajectories[0].num_steps
    [span] = prompts[2].media_spans
    assert span.start >= len(prompts[2].expanded_ids), "it is heard after the first answer"
    trained = groups[2].trajectories[0].action_mask
    assert trained.any() and not trained[span.start - len(prompts[2].expanded_ids) :][: span.end - span.start].any()
    policy = TokenPolicy(load_model(str(model), torch.float32, "sdpa").eval(), load_config(words).learner)
    sequences = [row_of(group.prompt, group.trajectories[0].actions) for group in groups]
    with torch.no_grad():
        batch = collate(sequences, MediaReader(timeout_s=5, max_items=8), torch.device("cpu"))
        logprobs = policy(batch, Distribution(1.0, ())).logprobs
    assert logprobs.isfinite().all() and torch.allclose(logprobs[0], logprobs[1])
    with pytest.raises(PromptError, match="max_audios_per_prompt is 0"):
        processor(load_config(words)).prepare(rows[0], "0/0")
