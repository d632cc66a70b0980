"""Demonstrated episodes have the tokens, masks and images that sampled episodes have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from episode_data import episode_config

from mobula.actors.environments.rows import environment_split
from mobula.actors.processors.chat import ChatProcessor
from mobula.actors.rollout.demonstrations import Demonstration, Demonstrations
from mobula.cluster.errors import DatasetError
from mobula.cluster.records.media import MediaStore
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.learner.policies.tiny import TINY


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY["qwen2.5-vl"](tmp_path_factory.mktemp("demonstrations") / "model")


async def demonstrated(config: RunConfig, num: int = 1) -> tuple[ChatProcessor, list[Demonstration]]:
    store = MediaStore(lambda media: media, 1 << 28)
    chat = ChatProcessor(config.policy.model, config.data, config.sampler, store, keep_files=False)
    found = Demonstrations(config.environment, config.sampler, chat, model=config.policy.model)
    try:
        rows = environment_split(config.environment, "train", takes_images=True).rows[:num]
        return chat, [await found.of(chat.prepare(row, f"0/{n}/x")) for n, row in enumerate(rows)]
    finally:
        found.close()


@pytest.mark.parametrize("host", ["inline", "process"])
async def test_a_demonstration_is_a_whole_episode_whose_turns_alone_are_trained(model: Path, host: str) -> None:
    words = (f"environment.host={host}", "environment.num_train=1")
    chat, [found] = await demonstrated(episode_config(model, *words))
    written = chat._tokenizer.decode(found.actions.token_ids[found.mask])
    assert written == "go 1<|im_end|>go 2<|im_end|>go 3<|im_end|>"
    assert found.mask[-1], "what follows the last turn is no part of it"
    assert len(found.actions.media) == 2
    pad = chat.images.placeholder_id
    assert all((found.actions.token_ids[s.start : s.end] == pad).all() for s in found.actions.media_spans)
    assert not any(found.mask[s.start : s.end].any() for s in found.actions.media_spans)


async def test_the_calculator_shows_a_call_and_its_result_and_the_maze_a_way(model: Path) -> None:
    few = ("environment.num_train=24", f"policy.model={model}")
    _, [shown, *_] = await demonstrated(load_config(["experiment=calculator", *few]))
    assert np.count_nonzero(np.diff(shown.mask.astype(int)) == 1) == 1, "two turns"
    _, walks = await demonstrated(load_config(["experiment=pixel_maze", *few]), num=24)
    num_turns = [1 + np.count_nonzero(np.diff(walk.mask.astype(int)) == 1) for walk in walks]
    assert [len(walk.actions.media) for walk in walks] == [num - 1 for num in num_turns]
    assert 1 < np.mean(num_turns) < 4 and max(num_turns) >= 3


async def test_a_demonstrated_turn_that_the_policy_could_not_write_is_refused(model: Path) -> None:
    words = ["experiment=calculator", f"policy.model={model}", "environment.num_train=1", "sampler.max_tokens=64"]
    with pytest.raises(DatasetError, match=r"has 8\d tokens .* set sampler.max_tokens=8\d or more"):
        await demonstrated(load_config(words))


async def test_an_environment_that_shows_nothing_is_refused(model: Path) -> None:
    words = ["data=environment", "environment=gymnasium", "environment.host=inline", "environment.num_train=1"]
    config = load_config([*words, "rewards=environment", f"policy.model={model}", "data.max_pixels=50176"])
    with pytest.raises(DatasetError, match="demonstrates nothing"):
        await demonstrated(config)
