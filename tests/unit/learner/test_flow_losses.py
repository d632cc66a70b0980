"""Rows of flow models, and losses of clean images."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flow_run import SIGMAS, latent_actions, latent_group, latent_prompt
from group_data import image_prompt

from mobula.cluster.records.actions import LatentActions
from mobula.cluster.records.media import MediaHandle, MediaReader, ProcessedMedia
from mobula.cluster.records.trajectory import MediaSpan, Prompt, Reward, ScoredGroup, TrajectoryGroup
from mobula.configs.load import load_config
from mobula.learner.algorithms.advantages import ADVANTAGES, AdvantageOptions, EarlierRewards, StepRewards
from mobula.learner.algorithms.flow_losses import grpo_guard, nft
from mobula.learner.algorithms.policy_losses import POLICY_LOSSES
from mobula.learner.batch import collate_items, fetch_items
from mobula.learner.policies.flow.policy import CONDITION, CleanSequence, Noising, collate_noised
from mobula.learner.policies.packing import split_microbatches
from mobula.learner.policies.trained import row_of

CPU = torch.device("cpu")
LEVELS = np.array([1.0, 0.8, 0.5, 0.2], dtype=np.float32)
NO_IDS = np.empty(0, dtype=np.int32)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_nft_is_the_weighted_sum_of_both_errors(beta: float) -> None:
    predicted, old, clean, noise = (random(2, 3, 1, 4, 4, seed=n) for n in range(4))
    sigmas = torch.tensor([0.9, 0.5, 0.1], dtype=torch.float64).view(1, 3, 1, 1, 1).expand(2, 3, 1, 1, 1)
    noised = (1 - sigmas) * clean + sigmas * noise
    advantages = torch.tensor([[2.5], [-9.0]], dtype=torch.float64)
    found = nft(predicted, old, noised, clean, sigmas, advantages, beta=beta, max_advantage=5.0)
    for row, share in enumerate((0.75, 0.0)):
        expected = []
        for k in range(3):
            x, sigma = noised[row, k], float(sigmas[row, k])
            errors = []
            for sign in (1, -1):
                velocity = old[row, k] + sign * beta * (predicted[row, k] - old[row, k])
                difference = x - sigma * velocity - clean[row, k]
                errors.append(float((difference**2).mean() / difference.abs().mean()))
            expected.append(5.0 / beta * (share * errors[0] + (1 - share) * errors[1]))
        assert float(found.loss[row]) == pytest.approx(np.mean(expected))
    assert found.is_clipped.tolist() == [[False], [True]]


def test_nft_pulls_towards_good_images_and_pushes_away_from_bad_ones() -> None:
    clean, noise, sigmas = random(1, 1, 1, 4, 4), random(1, 1, 1, 4, 4, seed=1), torch.full((1, 1, 1, 1, 1), 0.5)
    old = random(1, 1, 1, 4, 4, seed=2)
    wanted = noise - clean

    def along(advantage: float) -> float:
        """How far a step down the gradient goes towards the velocity of the image."""
        predicted = old.clone().requires_grad_()
        noised = (1 - sigmas) * clean + sigmas * noise
        advantages = torch.tensor([[advantage]])
        nft(predicted, old, noised, clean, sigmas, advantages, beta=1.0, max_advantage=5.0).loss.sum().backward()
        return float((-predicted.grad * (wanted - old)).sum())

    assert along(3.0) > 0 > along(-3.0)
    assert along(0.0) == pytest.approx(0, abs=1e-9)


def test_guard_is_the_clipped_ratio_without_its_drift_at_one_scale() -> None:
    logprobs, old, advantages = random(2, 3), random(2, 3, seed=1), random(2, 3, seed=2)
    std, length, drift = (random(2, 3, seed=n).abs() + 0.1 for n in (3, 4, 5))
    bounds = {"clip_low": 0.2, "clip_high": 0.2}
    found = grpo_guard(logprobs, old, advantages, std, length, drift, **bounds)
    plain = POLICY_LOSSES["ppo_clip"](std * (logprobs - old + drift), torch.zeros(2, 3), advantages, None, **bounds)
    torch.testing.assert_close(found.loss, plain.loss / length)
    torch.testing.assert_close(found.ratio, plain.ratio)


def test_a_global_std_divides_all_groups_by_the_same_number() -> None:
    values = torch.tensor([1.0, 0.0, 0.51, 0.49, 0.5, 0.5], dtype=torch.float64)
    rewards = StepRewards(
        values=values,
        included=torch.tensor([True] * 6),
        group_ids=torch.tensor([0, 0, 1, 1, 2, 2]),
        lengths=torch.ones(6),
        components=torch.zeros(6, 0),
        weights=torch.zeros(6, 0),
        prompt_ids=torch.tensor([0, 0, 1, 1, 2, 2]),
        earlier=EarlierRewards(torch.zeros(0), torch.zeros(0, dtype=torch.int64)),
    )
    found = ADVANTAGES["grpo_global_std"](rewards, AdvantageOptions("population", 1, 1.0))
    centred = np.array([0.5, -0.5, 0.01, -0.01, 0, 0])
    np.testing.assert_allclose(found.numpy(), centred / (values.numpy().std() + 1e-4), rtol=1e-6)


def prompt(name: str) -> Prompt:
    processed = ProcessedMedia(CONDITION, {"text": np.full((1, 2), len(name), np.float32)})
    handle = MediaHandle(name, CONDITION, processed.num_bytes, processed, name)
    return Prompt(f"0/0/{name}", name, name, NO_IDS, NO_IDS, (handle,), (MediaSpan(0, 0),))


def actions(seed: int) -> LatentActions:
    latents = np.random.default_rng(seed).standard_normal((2, 1, 4, 4), dtype=np.float32)
    return LatentActions(latents, np.array([3], np.int32), 1000 * LEVELS[3:], np.append(LEVELS, 0).astype(np.float32))


def test_noise_of_an_image_depends_on_nothing_beside_it() -> None:
    noising = Noising(LEVELS, 1000 * LEVELS, "uniform", 3)
    rows = [CleanSequence.of_response(noising, prompt(name), actions(n)) for n, name in enumerate("abb")]
    reader = MediaReader(timeout_s=1, max_items=4)
    together, alone = collate_noised(rows, reader, CPU), collate_noised(rows[1:2], reader, CPU)
    assert together.clean.shape == (9, 1, 4, 4) and together.condition_rows.tolist() == [0] * 3 + [1] * 6
    for name in ("clean", "noise", "sigmas", "timesteps", "noised"):
        torch.testing.assert_close(getattr(together, name)[3:6], getattr(alone, name), rtol=0, atol=0)
    torch.testing.assert_close(together.timesteps, 1000 * together.sigmas)
    assert not torch.equal(together.noise[3:6], together.noise[6:9]), "siblings have noise of their own"
    assert rows[0].num_targets == 1 and rows[0].num_tokens == 48 and together.old is None
    old = [row.with_old(np.full((3, 1, 4, 4), n, np.float32)) for n, row in enumerate(rows)]
    assert collate_noised(old, reader, CPU).old[:, 0, 0, 0].tolist() == [0.0] * 3 + [1.0] * 3 + [2.0] * 3


def test_logit_normal_levels_are_in_the_middle_more_often() -> None:
    table = np.linspace(1, 0, 1000, endpoint=False, dtype=np.float32)
    generator = torch.Generator().manual_seed(0)
    places = Noising(table, table, "logit_normal", 20000).levels(generator).numpy() / 1000
    assert np.median(places) == pytest.approx(0.5, abs=0.02)
    assert np.mean((places > 0.25) & (places < 0.75)) == pytest.approx(0.728, abs=0.02)  # |N(0, 1)| < ln 3


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
