"""Every family: ids, tensors and log-probs equal its own processor's and forward's, of text, images, videos, sounds."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from clips import noise_frames, write_clip
from learner_data import group
from scored_rows import FamilyPrompts, chat_of, collated, family_prompts, learner_of, policy_at
from tiny_checkpoints import USUAL_FAMILIES, families
from transformers import AutoConfig, AutoProcessor
from transformers.video_utils import VideoMetadata

from mobula.actors.datasets.media import FrameList
from mobula.actors.datasets.open_split import open_split
from mobula.actors.datasets.prompts import preflight
from mobula.actors.datasets.rows import Row
from mobula.actors.processors.chat import ChatProcessor
from mobula.cluster.errors import MediaError
from mobula.cluster.records.arrow import from_batch, to_batch
from mobula.cluster.records.media import MediaHandle, ProcessedMedia
from mobula.cluster.records.trajectory import MediaSpan, Prompt
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.learner.policies.batch import TokenSequence
from mobula.learner.policies.families import family_at, family_of
from mobula.learner.policies.families.base import VideoFamily
from mobula.learner.policies.families.vision import released_positions as positions_of_papers
from mobula.learner.policies.head import PLAIN
from mobula.learner.policies.loading import checkpoint_names, load_model
from mobula.learner.policies.tiny import TINY, write_tiny
from mobula.learner.policies.token import TokenPolicy

ANSWER = np.array([20, 30, 40, 50], dtype=np.int32)
NAMES = ("qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3.5", "glm4v")
LONG = ("qwen3-vl", "qwen3.5", "glm4v")  # whose own bounds are those of all frames together
RATE = 4
FRAMES = noise_frames(24, (70, 50))
IMAGE = noise_frames(1, (101, 133), seed=1)[0]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Callable[[str], Path]:
    @cache
    def written(name: str) -> Path:
        return write_tiny(name, tmp_path_factory.mktemp("tiny") / name, seed=1)

    return written


@pytest.fixture(params=NAMES)
def folder(request, models) -> Path:
    return models(request.param)


def processor_of(folder: Path, *words: str, **options: Any) -> ChatProcessor:
    config = load_config([
        "experiment=digits", f"policy.model={folder}", "policy.tiny=none", "sampler.max_videos_per_prompt=2",
        "data.max_prompt_tokens=1024", "sampler.max_model_len=2048", *words,
    ])  # fmt: skip
    return chat_of(config, **options)


@pytest.fixture
def prompts(folder: Path, tmp_path: Path) -> list[Prompt]:
    """A video, an image, both in one prompt with the video first, the video twice, and text."""
    clip = write_clip(tmp_path / "clip.mkv", FRAMES, rate=RATE)
    image = tmp_path / "image.png"
    IMAGE.save(image)
    rows = [
        Row("video", "<video>Which?", "7", "7", videos=(clip,)),
        Row("image", "<image>Which?", "7", "7", (image,)),
        Row("both", "First <video> and <image>Which?", "7", "7", (image,), videos=(clip,)),
        Row("twice", "<video> and <video>Which?", "7", "7", videos=(clip, clip)),
        Row("text", "Which?", "7", "7"),
    ]
    chat = processor_of(folder)
    return [chat.prepare(row, f"0/{row.sample_id}") for row in rows]


def policy_of(folder: Path) -> TokenPolicy:
    return TokenPolicy(load_model(str(folder), torch.float32, "sdpa").eval(), learner_of(folder))


def own_inputs(folder: Path, prompt: Prompt) -> dict[str, torch.Tensor]:
    """By the checkpoint's own processor, of frames that were taken as `data.video` sets: 12 of 24, 2 a second."""
    config = load_config(["experiment=digits"]).data
    processor = AutoProcessor.from_pretrained(folder, min_pixels=config.min_pixels, max_pixels=config.max_pixels)
    taken = np.linspace(0, 23, 12).round().astype(int)  # no target is in the middle of two frames
    meta = VideoMetadata(total_num_frames=24, fps=RATE, frames_indices=taken.tolist())
    num_videos = sum(handle.modality == "video" for handle in prompt.media)
    videos = [np.stack([np.asarray(FRAMES[i]) for i in taken])] * num_videos
    images = [IMAGE] * (len(prompt.media) - num_videos)
    most = config.video.max_frame_pixels, config.video.min_frame_pixels
    per = 12 if folder.name in LONG else 1
    cap = {} if folder.name == "glm4v" else {"cap_pixels_per_frame": False}
    made = processor(
        text=[prompt.text], images=images or None, videos=videos or None, return_tensors="pt",
        add_special_tokens=False,
        videos_kwargs={
            "video_metadata": [meta] * num_videos, "do_sample_frames": False, **cap,
            "size": {"shortest_edge": most[1] * per, "longest_edge": most[0] * per}, "return_metadata": True,
        } if videos else {},
    )  # fmt: skip
    return {name: value for name, value in made.items() if name != "video_metadata"}


def released_positions(folder: Path, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """M-RoPE as in the papers' code, in float64: each block begins behind the largest position before it."""
    ids, types = inputs["input_ids"][0].tolist(), inputs["mm_token_type_ids"][0].tolist()
    images, videos = ([*inputs.get(name, [])] for name in ("image_grid_thw", "video_grid_thw"))
    found, place, start = np.zeros((3, len(ids)), dtype=np.int64), 0, 0
    while place < len(ids):
        if types[place] == 0:
            found[:, place], place, start = start, place + 1, start + 1
            continue
        t, h, w = (videos if types[place] == 2 else images).pop(0).tolist()
        step = 1.0
        if types[place] == 2 and "second_per_grid_ts" in inputs:
            step = float(inputs["second_per_grid_ts"][0]) * 4  # tokens_per_second of the tiny checkpoint
        block = [(int(a * step), b, c) for a in range(t) for b in range(h // 2) for c in range(w // 2)]
        found[:, place : place + len(block)] = np.array(block).T + start
        start, place = start + max(max(axes) for axes in block) + 1, place + len(block)
    return torch.from_numpy(found)[:, None]


@torch.no_grad()
def test_ids_tensors_and_log_probs_equal_the_familys_own(folder: Path, prompts: list[Prompt]) -> None:
    policy = policy_of(folder)
    found = policy(collated([TokenSequence.of_response(prompt, ANSWER) for prompt in prompts]), PLAIN).logprobs
    plain = load_model(str(folder), torch.float32, "sdpa").eval()
    if "second_per_grid_ts" in own_inputs(folder, prompts[0]):
        assert plain.config.vision_config.tokens_per_second == 4
    answer = torch.from_numpy(ANSWER).long()[None]
    for row, prompt in enumerate(prompts):
        inputs = own_inputs(folder, prompt)
        assert inputs["input_ids"][0].tolist() == prompt.expanded_ids.tolist(), prompt.sample_id
        for handle in prompt.media:
            for name, array in handle.reference.inputs.items():
                expected = np.asarray(inputs[name], dtype=np.float64)[: len(array)]
                np.testing.assert_allclose(array, expected, atol=1e-6, err_msg=name)
        if folder.name == "glm4v" and prompt.sample_id == "both":
            continue  # transformers looks for images and videos at the same token: the conformance suite compares it
        inputs["input_ids"] = torch.cat([inputs["input_ids"], answer], dim=1)
        inputs["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], answer * 0], dim=1)
        inputs.pop("attention_mask")
        if folder.name not in LONG:  # transformers 5 places text behind a long video elsewhere than engines do
            inputs["position_ids"] = released_positions(folder, inputs)
        logits = plain(**inputs).logits[0, -len(ANSWER) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, answer[0][:, None])[:, 0]
        named = partial("{}: {}".format, prompt.sample_id)
        torch.testing.assert_close(found[row], expected, atol=1e-5, rtol=0, msg=named)


@pytest.mark.parametrize("folder", ["qwen2.5-vl"], indirect=True)
def test_a_video_is_stored_once_and_rewards_get_the_frames_of_the_policy(folder: Path, tmp_path: Path) -> None:
    clip = write_clip(tmp_path / "clip.mkv", FRAMES, rate=RATE)
    row = Row("twice", "<video> and <video>Which?", "7", "7", videos=(clip, clip))
    prompt = processor_of(folder, keep_files=True).prepare(row, "0/twice")
    first, second = prompt.media
    assert first.key == second.key and first.reference is second.reference
    assert len(first.reference.files) == 12
    other = processor_of(folder, "data.video.fps=1").prepare(row, "0/twice").media[0]
    assert other.key != first.key


@pytest.mark.parametrize("folder", ["glm4v"], indirect=True)
def test_pairs_of_frames_with_times_between_have_the_positions_of_images(folder: Path) -> None:
    """M-RoPE of GLM-4.1V (arXiv:2507.01006): each pair of frames is an image, which text follows."""
    policy = policy_of(folder)
    place = policy.family.placeholder_id(policy.model.config)
    videos = []
    for num_pairs in (1, 2):
        pixels = np.zeros((num_pairs * 8, 3 * 2 * 14 * 14), dtype=np.float32)  # of 2 x 4 patches, 1 x 2 embeddings
        inputs = {"pixel_values_videos": pixels, "video_grid_thw": np.array([[num_pairs, 2, 4]])}
        videos.append(MediaHandle(str(num_pairs), "video", 0, ProcessedMedia("video", inputs)))
    ids = np.array([5, place, place, 6, 7, 8, place, place, 20, 21, 22, place, place, 9], dtype=np.int32)
    spans = (MediaSpan(1, 3), MediaSpan(6, 13))
    other = ids.copy()
    other[[8, 9, 10, 11, 12]] = [20, place, place, 21, 22]  # a span of equal length: other times of equal frames
    rows = [TokenSequence(row, 13, tuple(videos), spans) for row in (ids, other)]
    batch = collated(rows)
    types = torch.from_numpy((batch.host_ids == place) & batch.in_video).long() * 2
    found = policy.family.decoder_inputs(policy.family.core(policy.model), batch, types)["position_ids"]
    assert found[:, 0].tolist() == [
        [0, 1, 1, 3, 4, 5, 6, 6, 8, 9, 10, 11, 11, 13],
        [0, 1, 1, 3, 4, 5, 6, 6, 8, 9, 10, 11, 11, 13],
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13],
    ]
    assert found[:, 1].tolist() == [
        [0, 1, 1, 3, 4, 5, 6, 6, 8, 9, 9, 11, 12, 13],
        [0, 1, 1, 3, 4, 5, 6, 6, 8, 9, 9, 11, 12, 13],
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13],
    ]


@pytest.mark.parametrize("folder", ["qwen2.5-vl", "qwen3-vl", "glm4v"], indirect=True)
@pytest.mark.parametrize(("num_frames", "side"), [(24, 280), (10, 150)])  # of which 12 and 5 are shown
def test_budgets_bound_the_tokens_of_a_video(folder: Path, num_frames: int, side: int, tmp_path: Path) -> None:
    clip = write_clip(tmp_path / "clip.mkv", noise_frames(num_frames, (side, side)), rate=RATE)
    row = Row("video", "<video>Which?", "7", "7", videos=(clip,))
    family, most = family_at(str(folder)), 60
    video_id = family.video_placeholder_id(AutoConfig.from_pretrained(folder))
    prompt = processor_of(folder, f"data.video.max_tokens={most}").prepare(row, "0/video")
    num = int((prompt.expanded_ids == video_id).sum())
    assert 0.4 * most < num <= most
    fewer = processor_of(folder, "data.video.max_frames=4").prepare(row, "0/video")
    assert family.media_tokens and fewer.media[0].reference.inputs["video_grid_thw"].tolist()[0][0] == 2


def test_a_family_without_videos_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_tiny("idefics3", tmp_path / "idefics3", seed=1)
    message = r"max_videos_per_prompt=2 asks for videos.*of type idefics3: set it to 0.* internvl, llava"
    with pytest.raises(ValueError, match=message):
        processor_of(folder)


TOKENS_OF_A_FRAME = 4
MORE_TOKENS = {"llava-onevision": 1, "internvl3": 0}  # of a video than those of its frames


@pytest.fixture(scope="module", params=MORE_TOKENS)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def tiled_folder(name: str, tmp_path_factory) -> Path:
    return write_tiny(name, tmp_path_factory.mktemp("tiny") / "model", seed=1)


def video(folder: Path, num_frames: int) -> FrameList:
    paths = [folder / f"{num_frames}-{n}.png" for n in range(num_frames)]
    for path, frame in zip(paths, noise_frames(num_frames, (70, 50), seed=num_frames), strict=True):
        frame.save(path)
    return FrameList(tuple(paths), 2.0, f"{num_frames} frames")


@torch.no_grad()
def logprobs(policy: TokenPolicy, rows: list[TokenSequence]) -> list[np.ndarray]:
    found = policy(collated(rows), PLAIN).logprobs.numpy()
    return [row[: sequence.num_targets] for row, sequence in zip(found, rows, strict=True)]


def test_videos_of_any_length_share_a_batch_and_a_prompt(name: str, tiled_folder: Path, tmp_path: Path) -> None:
    noise_frames(1, (101, 133), seed=9)[0].save(tmp_path / "a.png")
    one, three, five = (video(tmp_path, n) for n in (1, 3, 5))
    asked = [
        Row("all", "<video>and <image>and <video>?", "7", "7", (tmp_path / "a.png",), videos=(three, five)),
        Row("one", "<video>?", "7", "7", videos=(one,)),
        Row("text", "What?", "7", "7"),
    ]
    chat = processor_of(tiled_folder)
    prompts = [chat.prepare(row, row.sample_id) for row in asked]
    family, config = family_at(str(tiled_folder)), AutoConfig.from_pretrained(tiled_folder)
    assert isinstance(family, VideoFamily)
    placeholder = family.video_placeholder_id(config)
    spans = [prompts[0].expanded_ids[span.start : span.end] for span in prompts[0].media_spans]
    assert [int((spans[i] == placeholder).sum()) for i in (0, 2)] == [
        num * TOKENS_OF_A_FRAME + MORE_TOKENS[name] for num in (3, 5)
    ]
    videos = [handle.reference.inputs for handle in prompts[0].media if handle.modality == "video"]
    given = family.engine_inputs(config, videos)["pixel_values_videos"]
    lengths = [len(array) for array in given] if isinstance(given, list) else [len(given)]
    assert lengths in ([3, 5], [3 + 5])

    policy, calls = policy_at(tiled_folder).eval(), []
    policy.model.model.vision_tower.register_forward_pre_hook(lambda *_: calls.append(1))
    rows = [TokenSequence.of_prompt(prompt) for prompt in prompts]
    together = logprobs(policy, rows)
    assert len(calls) == 1
    for row, found in zip(rows, together, strict=True):
        np.testing.assert_allclose(found, logprobs(policy, [row])[0], atol=1e-5)


def test_frames_that_take_too_many_tokens_are_refused(name: str, tiled_folder: Path, tmp_path: Path) -> None:
    num = 5 * TOKENS_OF_A_FRAME + MORE_TOKENS[name]
    chat = processor_of(tiled_folder, f"data.video.max_tokens={num - 1}")
    row = Row("r", "<video>?", "7", "7", videos=(video(tmp_path, 5),))
    message = rf"5 frames take {num} tokens.*max_tokens is {num - 1}: lower data\.video\.max_frames"
    with pytest.raises(MediaError, match=message):
        chat.check(row)


SOUND_RATE = 16_000
QUESTION = "<audio>Which pattern is this?"


@pytest.fixture(params=["qwen2-audio", "qwen2.5-omni"])
def hearing(request, models) -> Path:
    return models(request.param)


def tones(folder: Path, *words: str) -> RunConfig:
    return load_config([
        "experiment=tones", f"policy.model={folder}", "policy.tiny=none", "data.max_prompt_tokens=256",
        "data.max_skipped_fraction=1.0", *words,
    ])  # fmt: skip


def tones_processor(folder: Path) -> ChatProcessor:
    return chat_of(tones(folder))


@cache
def noise(length: int) -> np.ndarray:
    return np.random.default_rng(length).normal(0, 0.1, length).astype(np.float32)


@pytest.mark.parametrize(("samples", "tokens"), [(321, 1), (1_281, 2), (16_000, 25), (16_001, 25), (40_000, 62)])
def test_a_sound_takes_as_many_tokens_as_the_tower_makes_embeddings(
    hearing: Path, tmp_path: Path, samples: int, tokens: int
) -> None:
    soundfile.write(tmp_path / "a.wav", noise(samples), SOUND_RATE, subtype="FLOAT")
    row = Row("a", QUESTION, "7", "7", audios=(tmp_path / "a.wav",))
    chat = tones_processor(hearing)
    prompt = chat.prepare(row, "p")
    [span] = prompt.media_spans
    assert span.end - span.start == tokens
    assert chat.check(row) == prompt.num_tokens == len(prompt.compact_ids) - 1 + tokens
    policy = load_model(str(hearing), torch.float32, "sdpa").eval()
    shown = collated([TokenSequence.of_prompt(prompt)])
    with torch.no_grad():  # raises if the tower makes more or fewer
        assert family_of(policy.config).hidden_states(policy, shown).shape[1] == prompt.num_tokens


def test_a_sound_of_two_prompts_is_stored_once_and_travels_in_records(hearing: Path, tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.flac", noise(8_000), SOUND_RATE)
    chat = tones_processor(hearing)
    one, two = (chat.prepare(Row(n, QUESTION, "7", "7", audios=(tmp_path / "a.flac",)), n) for n in "ab")
    [handle] = one.media
    assert handle == two.media[0] and handle.modality == "audio"
    assert handle.reference is two.media[0].reference
    assert handle.reference.thumbnail.startswith(b"\x89PNG")
    scored = group(one, [[1, 2]], [1.0])
    back = from_batch(to_batch(scored.group, scored.rewards)).group.prompt
    assert (back.media, back.media_spans) == (one.media, one.media_spans)
    assert back.expanded_ids.tolist() == one.expanded_ids.tolist()


def test_rows_with_bad_sounds_are_skipped_and_named(hearing: Path, tmp_path: Path) -> None:
    soundfile.write(tmp_path / "good.wav", noise(8_000), SOUND_RATE)
    soundfile.write(tmp_path / "none.wav", np.zeros((0, 1)), SOUND_RATE)
    soundfile.write(tmp_path / "short.wav", noise(100), SOUND_RATE)
    soundfile.write(tmp_path / "long.wav", np.zeros(31 * SOUND_RATE, dtype=np.float32), SOUND_RATE)
    (tmp_path / "corrupt.wav").write_bytes(b"RIFF0000WAVEnoise" * 10)
    (tmp_path / "empty.wav").write_bytes(b"")
    names = ("good", "none", "short", "long", "corrupt", "empty", "missing", "../outside")
    rows = [{"id": name, "question": "<audio>Which?", "audio": f"{name}.wav"} for name in names]
    rows.append({"id": "two", "question": "<audio><audio>Which?", "audio": "good.wav"})
    rows.append({"id": "many", "question": "<audio><audio>Which?", "audio": ["good.wav", "good.wav"]})
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(row | {"answer": "7"}) for row in rows))
    found = tones(hearing, "data=jsonl", f"data.path={tmp_path}")
    split = open_split(found.data, "train", found.rewards.label_key)
    report = preflight(split, tones_processor(hearing), max_skipped_fraction=1.0, max_checked_rows=0)
    assert [report.rows[place].sample_id for place in range(len(report.rows))] == ["good"]
    details = {skipped.sample.rpartition("(")[2].rstrip(")"): skipped.detail for skipped in report.skipped}
    for name, message in {
        "none": "has 0 samples",
        "short": "too short to be heard, 321 samples are the fewest",
        "long": "reads 30 s of one sound",
        "corrupt": "corrupt or no sound",
        "empty": "is empty",
        "missing": "there is no file",
        "../outside": "leads out of the data folder",
        "two": "the text has 2 <audio> and the row 1 sounds",
        "many": "has 2 sounds, sampler.max_audios_per_prompt is 1",
    }.items():
        assert message in details[name], (name, details)


def test_a_model_that_does_not_hear_is_refused_by_name(tmp_path: Path) -> None:
    silent = write_tiny("qwen2.5-vl", tmp_path / "model")
    with pytest.raises(ValueError, match=r"max_audios_per_prompt=1 asks for sounds.*qwen2_5_vl: set it to 0"):
        tones_processor(silent)


@pytest.mark.parametrize("hearing", ["qwen2.5-omni"], indirect=True)
def test_positions_of_images_beside_sounds_are_those_of_the_paper(hearing: Path, tmp_path: Path) -> None:
    """A sound counts on like text; an image has rows and columns from where it begins."""
    prompt = family_prompts(hearing, tmp_path).cases["image and sound"].prompt
    image, sound = prompt.media_spans
    shown = collated([TokenSequence.of_prompt(prompt)])
    types = torch.zeros_like(shown.input_ids)
    types[:, image.start : image.end] = 1
    found = positions_of_papers(shown, types, 2, 25)[:, 0]
    _, height, width = (shown.media.inputs["image_grid_thw"][0] // torch.tensor([1, 2, 2])).tolist()
    assert image.end - image.start == height * width
    rows = np.indices((1, height, width)).reshape(3, -1) + image.start
    assert found[:, : image.start].tolist() == [list(range(image.start))] * 3
    assert found[:, image.start : image.end].tolist() == rows.tolist()
    behind = image.start + max(height, width)
    expected = list(range(behind, behind + prompt.num_tokens - image.end))
    assert found[:, image.end :].tolist() == [expected] * 3
    assert isinstance(sound, MediaSpan) and sound.start > image.end


SHOWN = [name for name in TINY if name not in ("qwen3", "qwen2.5", "llama")]
FORWARD = (*USUAL_FAMILIES, "qwen2.5-omni", "qwen3")
TOWERS = ("visual", "vision_tower", "vision_model", "audio_tower")


@pytest.fixture
def asked(folder: Path, tmp_path: Path) -> FamilyPrompts:
    return family_prompts(folder, tmp_path)


@pytest.fixture
def rows(asked: FamilyPrompts) -> dict[str, TokenSequence]:
    """A response of one more token to each case's prompt."""
    cases = enumerate(asked.cases.items())
    return {name: TokenSequence.of_response(case.prompt, ANSWER[: 1 + n]) for n, (name, case) in cases}


@pytest.fixture
def policy(folder: Path) -> TokenPolicy:
    model = load_model(str(folder), torch.float32, "sdpa").eval()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        for parameter in model.parameters():  # so that norms and biases matter
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return TokenPolicy(model, learner_of(folder))


@pytest.mark.parametrize("folder", families(TINY, FORWARD), indirect=True)
@torch.no_grad()
def test_ids_and_log_probs_equal_the_familys_own(folder, asked: FamilyPrompts, policy: TokenPolicy, rows) -> None:
    """Where a processor takes videos within a budget, or of one length alone, another test compares them."""
    assert sum(p.numel() for p in policy.parameters()) < 3_000_000
    found = policy(collated(list(rows.values())), PLAIN).logprobs
    plain = load_model(str(folder), torch.float32, "sdpa").eval()  # the policy's output layer gives log-probs
    plain.load_state_dict(policy.model.state_dict())
    for (name, row), logprobs in zip(rows.items(), found, strict=True):
        num_videos = len(asked.cases[name].videos)
        if num_videos > 1 or (num_videos and policy.family.has_pixel_budget):
            continue
        inputs, answer = asked.own_inputs(name), torch.from_numpy(row.token_ids[row.num_context :]).long()
        assert inputs["input_ids"][0].tolist() == row.token_ids[: row.num_context].tolist(), name
        for key, value in inputs.items():
            if key in ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"):
                tail = {"input_ids": answer, "attention_mask": torch.ones_like(answer)}.get(key, answer * 0)
                inputs[key] = torch.cat([value, tail[None]], dim=1)
        logits = plain(**inputs).logits[0, -len(answer) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, answer[:, None])[:, 0]
        assert expected.min() < -3
        message = f"{name}: {{}}".format
        torch.testing.assert_close(logprobs[: len(answer)], expected, atol=1e-5, rtol=0, msg=message)


def gradients(policy: TokenPolicy, *batches: list[TokenSequence]) -> dict[str, torch.Tensor]:
    """Of the sum of log-probs, by name of the parameters that have one."""
    policy.zero_grad()
    for batch in batches:
        policy(collated(batch), PLAIN).logprobs.sum().backward()
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("folder", families(SHOWN, FORWARD), indirect=True)
def test_the_tower_runs_once_a_batch_and_every_parameter_gets_a_gradient(policy: TokenPolicy, rows) -> None:
    batch, calls = list(rows.values()), []
    core = policy.family.core(policy.model)
    towers = [module for name, module in core.named_children() if name in TOWERS]
    for tower in towers:
        tower.register_forward_pre_hook(lambda *_: calls.append(1))
    reached = gradients(policy, batch[:1]).keys()
    assert all(p.grad.abs().max() == 0 for t in towers for p in t.parameters() if p.grad is not None)
    together = gradients(policy, batch)
    assert together.keys() == reached and len(calls) == 2 * len(towers)
    for tower in towers:
        assert max(p.grad.abs().max() for p in tower.parameters() if p.grad is not None) > 0
    for name, alone in gradients(policy, *([row] for row in batch)).items():
        message = f"{name}: {{}}".format
        torch.testing.assert_close(together[name], alone, atol=2e-4, rtol=2e-3, msg=message)


@pytest.mark.parametrize("folder", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl", "glm4v"], indirect=True)
def test_positions_of_images_are_those_of_the_papers(policy: TokenPolicy) -> None:
    """M-RoPE (arXiv:2409.12191, section 2.1): text counts on in all three; an image of t x h x w embeddings has the
    time, row and column of each, from where the text stopped; what follows begins behind the largest of them."""
    placeholder = policy.family.placeholder_id(policy.model.config)
    grid = np.array([[1, 4, 6]])  # patches; 2 x 3 embeddings
    pixels = np.zeros(
        (24, policy.family.blank_image(policy.model.config, torch.device("cpu"))["pixel_values"].shape[1])
    )
    medium = ProcessedMedia("image", {"pixel_values": pixels.astype(np.float32), "image_grid_thw": grid})
    handle = MediaHandle("k", "image", 0, medium)
    ids = np.array([5, 6, 7, *[placeholder] * 6, 8, 9], dtype=np.int32)
    rows = [
        TokenSequence(ids, 10, (handle,), (MediaSpan(3, 9),)),
        TokenSequence(np.arange(10, 21, dtype=np.int32), 2, (), ()),
    ]
    shown = collated(rows)
    types = torch.from_numpy((shown.host_ids == placeholder) & shown.in_media).long()
    found = policy.family.decoder_inputs(policy.family.core(policy.model), shown, types)["position_ids"]
    expected = [
        [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7],
        [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7],
        [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7],
    ]
    assert found[:, 0].tolist() == expected
    assert found[:, 1].tolist() == [list(range(11))] * 3


@pytest.mark.parametrize("folder", families([name for name in SHOWN if name != "llava"]), indirect=True)
def test_parts_and_media_tokens_are_there(folder: Path, asked: FamilyPrompts, policy: TokenPolicy) -> None:
    family = family_at(str(folder))
    names = list(checkpoint_names(policy.model).values())
    for part, starts in family.parts.items():
        assert any(name.startswith(starts) for name in names), (part, names[:3])
    assert all(name.startswith(tuple(s for starts in family.parts.values() for s in starts)) for name in names)
    sees = family.takes_images
    placeholder = (family.placeholder_id if sees else family.audio_placeholder_id)(policy.model.config)
    assert placeholder in asked.processor.media_token_ids
    prompt = asked.cases["several sizes" if sees else "two sounds"].prompt
    assert len(prompt.media_spans) == (3 if sees else 2)
    inside = np.zeros(prompt.num_tokens, dtype=bool)
    for span in prompt.media_spans:
        inside[span.start : span.end] = True
    assert not (prompt.expanded_ids[~inside] == placeholder).any()


@pytest.mark.parametrize("folder", ["llava-onevision"], indirect=True)
def test_a_partitioned_newline_is_refused(policy: TokenPolicy, rows) -> None:
    policy.model.model.image_newline.data = torch.empty(0)  # as ZeRO-3 leaves it between forward passes
    message = r"learner\.zero_stage=3 partitions image_newline .*zero_stage=2, or learner=fsdp2"
    with pytest.raises(ValueError, match=message):
        policy(collated(list(rows.values())), PLAIN)
