"""Videos whose frames are tiles: of any number in a prompt and a batch, with images in one call of the tower."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from clips import noise_frames
from transformers import AutoConfig

from mobula.actors.datasets.clips import FrameList
from mobula.actors.datasets.rows import Row
from mobula.actors.processors.chat import ChatProcessor
from mobula.cluster.errors import MediaError
from mobula.cluster.records.media import MediaReader, MediaStore
from mobula.configs.load import load_config
from mobula.learner.policies.batch import TokenSequence, collate
from mobula.learner.policies.families import family_at
from mobula.learner.policies.families.base import VideoFamily
from mobula.learner.policies.head import PLAIN
from mobula.learner.policies.loading import load_model
from mobula.learner.policies.tiny import write_tiny
from mobula.learner.policies.token import TokenPolicy

CPU = torch.device("cpu")
TOKENS_OF_A_FRAME = 4
MORE_TOKENS = {"llava-onevision": 1, "internvl3": 0}  # of a video than those of its frames


@pytest.fixture(scope="module", params=MORE_TOKENS)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory) -> Path:
    return write_tiny(name, tmp_path_factory.mktemp("tiny") / "model", seed=1)


def chat_of(folder: Path, *words: str) -> ChatProcessor:
    run = load_config([
        "experiment=digits", f"policy.model={folder}", "policy.tiny=none", "sampler.max_videos_per_prompt=2",
        "data.max_prompt_tokens=512", "sampler.max_model_len=1024", *words,
    ])  # fmt: skip
    return ChatProcessor(str(folder), run.data, run.sampler, MediaStore(lambda media: media, 1 << 20), keep_files=False)


def video(folder: Path, num_frames: int) -> FrameList:
    paths = [folder / f"{num_frames}-{n}.png" for n in range(num_frames)]
    for path, frame in zip(paths, noise_frames(num_frames, (70, 50), seed=num_frames), strict=True):
        frame.save(path)
    return FrameList(tuple(paths), 2.0, f"{num_frames} frames")


def logprobs(policy: TokenPolicy, rows: list[TokenSequence]) -> list[np.ndarray]:
    batch = collate(rows, MediaReader(timeout_s=1, max_items=8), CPU)
    with torch.no_grad():
        found = policy(batch, PLAIN).logprobs.numpy()
    return [row[: sequence.num_targets] for row, sequence in zip(found, rows, strict=True)]


def test_videos_of_any_length_share_a_batch_and_a_prompt(name: str, folder: Path, tmp_path: Path) -> None:
    noise_frames(1, (101, 133), seed=9)[0].save(tmp_path / "a.png")
    one, three, five = (video(tmp_path, n) for n in (1, 3, 5))
    asked = [
        Row("all", "<video>and <image>and <video>?", "7", "7", (tmp_path / "a.png",), videos=(three, five)),
        Row("one", "<video>?", "7", "7", videos=(one,)),
        Row("text", "What?", "7", "7"),
    ]
    chat = chat_of(folder)
    prompts = [chat.prepare(row, row.sample_id) for row in asked]
    family, config = family_at(str(folder)), AutoConfig.from_pretrained(folder)
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

    policy = TokenPolicy(
        load_model(str(folder), torch.float32, "sdpa").eval(), load_config(["experiment=digits"]).learner
    )
    calls: list[int] = []
    policy.model.model.vision_tower.register_forward_pre_hook(lambda *_: calls.append(1))
    rows = [TokenSequence.of_prompt(prompt) for prompt in prompts]
    together = logprobs(policy, rows)
    assert len(calls) == 1
    for row, found in zip(rows, together, strict=True):
        np.testing.assert_allclose(found, logprobs(policy, [row])[0], atol=1e-5)


def test_frames_that_take_too_many_tokens_are_refused(name: str, folder: Path, tmp_path: Path) -> None:
    num = 5 * TOKENS_OF_A_FRAME + MORE_TOKENS[name]
    chat = chat_of(folder, f"data.video.max_tokens={num - 1}")
    row = Row("r", "<video>?", "7", "7", videos=(video(tmp_path, 5),))
    with pytest.raises(
        MediaError, match=rf"5 frames take {num} tokens.*max_tokens is {num - 1}: lower data\.video\.max_frames"
    ):
        chat.check(row)
