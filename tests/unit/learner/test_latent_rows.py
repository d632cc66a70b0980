"""Denoising steps as the learner's rows: fetched, packed and lined up, step by step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from group_data import image_prompt
from latent_data import SIGMAS, latent_actions, latent_group, latent_prompt

from mobula.cluster.records.media import MediaReader
from mobula.cluster.records.trajectory import Reward, ScoredGroup, TrajectoryGroup
from mobula.configs.load import load_config
from mobula.learner.batch import collate_items, fetch_items
from mobula.learner.policies.packing import split_microbatches
from mobula.learner.policies.trained import row_of

CPU = torch.device("cpu")


def scored(group: TrajectoryGroup) -> ScoredGroup:
    return ScoredGroup(group.summary(), group, tuple(Reward(float(n)) for n in range(len(group.trajectories))))


def reader() -> MediaReader:
    return MediaReader(timeout_s=1, max_items=8)


def test_items_of_denoising_steps_become_one_batch_of_all_their_steps() -> None:
    two = [latent_actions(0), latent_actions(1, first=2, num_steps=2, dtype=np.float16)]
    one = [latent_actions(2, first=1, num_steps=1)]
    groups = [latent_group(latent_prompt("71", ""), two), latent_group(latent_prompt("8", ""), one)]
    items = [item for row in fetch_items([scored(g) for g in groups], 2, 1.0) for item in row]
    batch = collate_items(items, reader(), CPU)
    found, actions = batch.inputs, [*two, *one]
    assert batch.loss_mask.tolist() == [[True] * 3, [True, True, False], [True, False, False]]
    assert found.target_mask.tolist() == batch.loss_mask.tolist()
    assert batch.ages[0].tolist() == [2, 2, 2]
    for name, expected in {
        "latents": np.concatenate([a.latents[:-1] for a in actions]),
        "next_latents": np.concatenate([a.latents[1:] for a in actions]),
        "timesteps": 1000 * SIGMAS[[0, 1, 2, 2, 3, 1]],
        "sigmas": SIGMAS[[0, 1, 2, 2, 3, 1]],
        "next_sigmas": SIGMAS[[1, 2, 3, 3, 4, 2]],
        "max_sigmas": np.full(6, SIGMAS[1]),
    }.items():
        tensor = getattr(found, name)
        assert tensor.dtype == torch.float32, name
        np.testing.assert_array_equal(tensor.numpy(), expected.astype(np.float32))


def test_each_condition_is_read_once_and_found_by_each_step() -> None:
    groups = [latent_group(latent_prompt(t, ""), [latent_actions(n, num_steps=2)]) for n, t in enumerate(("71", "8"))]
    items = [item for row in fetch_items([scored(g) for g in groups], 1, 1.0) for item in row]
    found = collate_items(items, reader(), CPU).inputs
    encoded = found.conditions["encoder_hidden_states"]
    assert encoded.shape == (3, 3, 8)  # two prompts and the negative prompt that they share
    for n, group in enumerate(groups):
        own, negative = (handle.reference.inputs["encoder_hidden_states"] for handle in group.prompt.media)
        for step in (2 * n, 2 * n + 1):
            np.testing.assert_array_equal(encoded[found.condition_rows[step]].numpy(), own[0])
            np.testing.assert_array_equal(encoded[found.negative_rows[step]].numpy(), negative[0])


def test_without_guidance_there_is_no_negative_prompt() -> None:
    group = latent_group(latent_prompt("71"), [latent_actions(0)])
    [[item]] = fetch_items([scored(group)], 1, 1.0)
    assert collate_items([item], reader(), CPU).inputs.negative_rows is None


def test_a_micro_batch_holds_as_many_places_of_latent_images_as_it_may() -> None:
    asked = latent_prompt("71")
    rows = [row_of(asked, latent_actions(n)) for n in range(4)]  # 3 steps of 2 x 2 places each
    assert [row.num_tokens for row in rows] == [12] * 4
    config = load_config(["experiment=digits", "learner.tokens_per_microbatch=24"]).learner
    [plan] = split_microbatches(rows, config, 1)
    assert [len(part) for part in plan] == [2, 2]


def test_denoising_steps_of_a_prompt_that_was_not_encoded_are_refused() -> None:
    with pytest.raises(ValueError, match=r"has the media \['image'\]: denoising steps need its encoded text"):
        row_of(image_prompt(), latent_actions(0))
