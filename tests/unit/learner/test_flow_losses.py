"""Losses of flow models: their numbers by hand, and clean images at drawn noise levels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mobula.cluster.records.actions import LatentActions
from mobula.cluster.records.media import MediaHandle, MediaReader, ProcessedMedia
from mobula.cluster.records.trajectory import MediaSpan, Prompt
from mobula.learner.algorithms.advantages import ADVANTAGES, AdvantageOptions, EarlierRewards, StepRewards
from mobula.learner.algorithms.flow_losses import grpo_guard, nft
from mobula.learner.algorithms.policy_losses import POLICY_LOSSES
from mobula.learner.policies.flow.policy import CONDITION, CleanSequence, Noising, collate_noised

CPU = torch.device("cpu")
SIGMAS = np.array([1.0, 0.8, 0.5, 0.2], dtype=np.float32)
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
    return LatentActions(latents, np.array([3], np.int32), 1000 * SIGMAS[3:], np.append(SIGMAS, 0).astype(np.float32))


def test_noise_of_an_image_depends_on_nothing_beside_it() -> None:
    noising = Noising(SIGMAS, 1000 * SIGMAS, "uniform", 3)
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
