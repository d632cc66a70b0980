"""Rows of data that an environment plays: their prompts, demonstrations, episodes and refusals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from episode_data import engine_settings
from fakes import turns
from PIL import Image
from scored_rows import chat_of

from mobula.actors.datasets.open_split import open_split
from mobula.actors.datasets.rows import Row, RowError
from mobula.actors.environments.rows import DEMONSTRATION, ENVIRONMENT, environment_split, row_options, row_player
from mobula.actors.processors.chat import ChatProcessor
from mobula.actors.rollout.actor import MediaBatcher
from mobula.actors.rollout.controls import controlled
from mobula.actors.rollout.episodes import Demonstrations, EpisodeRunner
from mobula.actors.samplers.huggingface import HuggingFaceSampler
from mobula.cluster.errors import DatasetError
from mobula.cluster.records.media import MediaReader, ProcessedMedia
from mobula.cluster.records.partial_response import Attempt
from mobula.cluster.records.trajectory import FinishReason, Prompt
from mobula.cluster.roles import SamplingSettings
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.configs.schema.run import Control
from mobula.deploy.preflight.rows import FIELD, ROWS, row_notes
from mobula.learner.policies.tiny import TINY

SIDE = 112
CALL = '<tool_call>{"name": "crop_image", "arguments": {"bbox_2d": [0, 0, 500, 500]}}</tool_call>'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY["qwen2.5-vl"](tmp_path_factory.mktemp("played") / "model")


@pytest.fixture
def config(model: Path, tmp_path: Path) -> RunConfig:
    """Of a run on one row, whose image is larger than the policy sees it."""
    pixels = np.random.default_rng(0).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "0.png")
    row = {"id": "a", "question": "<image>What?", "answer": "7", "solution": "7", "image": "0.png"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row | {"demonstration": [CALL, "7"]}) + "\n")
    return load_config([
        "experiment=zoom_digits", f"policy.model={model}", "data=jsonl", f"data.path={tmp_path}",
        "data.max_pixels=3136", "data.prompt_suffix=''", "data.max_prompt_tokens=400", "sampler.max_tokens=112",
        "environment.max_tokens=400", "sampler.max_model_len=1024",
    ])  # fmt: skip


def played(config: RunConfig) -> tuple[ChatProcessor, Row]:
    chat = chat_of(config, keep_files=True)
    split = open_split(config.data, "train", "label", change=row_player(config.environment, chat))
    return chat, split.rows[0]


def test_the_tools_are_in_the_prompt(config: RunConfig) -> None:
    chat, row = played(config)
    assert row.metadata[ENVIRONMENT] == {}
    text = chat.prepare(row, "0/0/a").text
    assert "user\nTools:" in text and '"name": "crop_image"' in text and "bbox_2d" in text
    native = chat.tokenizer.chat_template.replace(
        "{%- for message", "{%- if tools -%}{{- tools[0].function.name -}}{%- endif -%}{%- for message", 1
    )
    chat.renderer.chat_template = chat.tokenizer.chat_template = native
    shown = open_split(config.data, "train", "label", change=row_player(config.environment, chat)).rows[0]
    text = chat.prepare(shown, "0/0/b").text
    assert text.startswith("crop_image") and "Tools:" not in text


async def test_a_demonstration_looks_at_the_file_and_not_at_what_the_policy_saw(config: RunConfig) -> None:
    chat, row = played(config)
    prompt = chat.prepare(row, "0/0/a")
    read = MediaReader(timeout_s=5, max_items=8).read
    made = Demonstrations(config.environment, config.sampler, chat, model=config.policy.model, read=read)
    try:
        found = await made.of(prompt)
    finally:
        made.close()
    assert chat.tokenizer.decode(found.actions.token_ids[found.mask]) == f"{CALL}<|im_end|>7<|im_end|>"
    [crop] = read(found.actions.media)
    assert read(prompt.media)[0].files, "the environment is given the file"
    options = row_options(prompt, [ProcessedMedia("video", {}, files=(b"frame",)), *read(prompt.media)])
    assert len(options["images"]) == len(options["shown"]) == 1, "frames of videos have no size of their own"
    grid = crop.inputs["image_grid_thw"].reshape(-1).tolist()
    assert grid[1] * grid[2] == 16, "the crop of 56 pixels is shown whole, as the picture of 112 is not"


async def test_rows_of_equal_ids_in_two_splits_have_their_own_demonstrations(config: RunConfig) -> None:
    chat, row = played(config)
    read = MediaReader(timeout_s=5, max_items=8).read
    made = Demonstrations(config.environment, config.sampler, chat, model=config.policy.model, read=read)
    other = replace(row, answer="8", solution="8", metadata={**row.metadata, DEMONSTRATION: ["8"]})
    try:
        first, second = [await made.of(chat.prepare(each, "0/0/a")) for each in (row, other)]
    finally:
        made.close()
    assert len(first.mask) > len(second.mask)


def test_the_warm_start_reads_demonstrations_and_refuses_others_than_texts(config: RunConfig) -> None:
    _, row = played(config)
    assert row.unread == (DEMONSTRATION,)
    notes = replace(row, unread=(DEMONSTRATION, "other"))
    assert list(row_notes(config, notes)) == [ROWS, f"{FIELD}other"]
    without = config.model_copy(update={"warm_start": config.warm_start.model_copy(update={"num_steps": 0})})
    assert list(row_notes(without, notes)) == [ROWS, f"{FIELD}{DEMONSTRATION}", f"{FIELD}other"]
    (config.data.path / "train.jsonl").write_text(
        json.dumps({"id": "a", "question": "What?", "answer": "7", "demonstration": "7"}) + "\n"
    )
    with pytest.raises(RowError, match="`demonstration` is '7': write a list of texts"):
        played(config)


class Scripted:
    """A sampler that writes given turns."""

    def __init__(self, chat: ChatProcessor, sampler: HuggingFaceSampler, texts: Sequence[str]) -> None:
        self._chat, self._sampler, self._texts = chat, sampler, texts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    async def sample(self, prompt: Prompt, media: Any, settings: Any, attempt: Attempt, emit: Any) -> Any:
        turn = int(attempt.request_id.rpartition("/")[2])
        [sampled] = await self._sampler.sample(prompt, media, settings, attempt, emit)
        await turns(1)
        ids = self._chat.encode_answer(self._texts[turn])
        actions = type(sampled.actions)(ids)
        spans = tuple(type(span)(span.version, 0, len(ids)) for span in sampled.weight_spans[:1])
        return [type(sampled)(actions, np.zeros(len(ids), dtype=np.float32), spans, FinishReason.STOP)]


async def episode(config: RunConfig, texts: Sequence[str]) -> Any:
    chat, row = played(config)
    sampler = HuggingFaceSampler(engine_settings(Path(config.policy.model), chat))
    await sampler.start()
    media = MediaBatcher(MediaReader(timeout_s=5, max_items=64))
    scripted: Any = Scripted(chat, sampler, texts)
    runner = EpisodeRunner(config.environment, chat, scripted, media, model=config.policy.model, max_images=8)
    try:
        settings = SamplingSettings(1, 1.0, 2, seed=0)
        group = await runner.generate(chat.prepare(row, "0/0/a"), settings, Attempt("r"))
    finally:
        runner.close()
        await sampler.close()
    return group.trajectories[0]


async def test_an_episode_ends_with_the_answer_and_rewards_read_it(config: RunConfig) -> None:
    found = await episode(config, [CALL, "It is 7."])
    assert found.finish_reason is FinishReason.TERMINATED
    assert found.response.text == "It is 7." and not found.response.failure
    first, last = found.response.turns
    assert (first.rewards, last.rewards) == ({"calls": 1.0}, {"calls": 0.0})
    assert first.observation == "tool: <image>" and len(found.actions.media) == 1


async def test_a_bad_call_costs_its_turn_alone(config: RunConfig) -> None:
    found = await episode(config, [CALL.replace("500, 500", "0, 0"), "7"])
    assert found.response.text == "7" and "has no area" in found.response.turns[0].observation


def test_controls_change_the_picture_that_tools_work_on(config: RunConfig) -> None:
    chat, row = played(config)
    [blank] = controlled(Control.BLANK_IMAGE, [row], chat, seed=0)
    assert blank.metadata[ENVIRONMENT] == {}, "what a crop shows follows from the picture"
    assert blank.images != row.images
    [none] = controlled(Control.NO_IMAGE, [row], chat, seed=0)
    assert none.images == ()


def test_data_and_environment_have_to_fit(config: RunConfig) -> None:
    chat = chat_of(config)
    calculator = load_config(["experiment=calculator"]).environment
    with pytest.raises(DatasetError, match="makes its own prompts: set data=environment"):
        row_player(calculator, chat)
    with pytest.raises(DatasetError, match="plays rows of data: set data and data.path"):
        environment_split(config.environment, "train", takes_images=True)
