"""Steps of flow models against their papers' formulas in double precision, and against what was measured elsewhere."""

from __future__ import annotations

import math
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from torch.distributions import Normal, kl_divergence

from mobula.learner.policies.sde import KERNELS, FlowStep, gaussian_kl, guided

STOCHASTIC = ("flow_grpo", "sde", "dance", "cps")
# 10 steps with a shift of 3, and s sqrt(-dt) of flow_grpo at a noise level of 0.7.
SIGMAS = (1, 0.960129, 0.913349, 0.857692, 0.790368, 0.707278, 0.602151, 0.464876, 0.278049, 0.008929, 0)
DEVIATIONS = (0.700, 0.743, 0.536, 0.446, 0.392, 0.353, 0.319, 0.282, 0.225, 0.0063)
LEVEL = 0.7


def schedule() -> np.ndarray:
    """float64 [11]: what a scheduler with a shift of 3 makes of 1000 training steps in 10."""
    flat = np.linspace(1.0, 3 * 0.001 / (1 + 2 * 0.001), 10)
    return np.append(3 * flat / (1 + 2 * flat), 0.0)


def steps(seed: int = 0, sigmas: np.ndarray | None = None) -> tuple[FlowStep, np.ndarray, np.ndarray, np.ndarray]:
    """All steps of a schedule at once, and latents, velocities and next latents in double precision."""
    levels = schedule() if sigmas is None else sigmas
    rng, num = np.random.default_rng(seed), len(levels) - 1
    x, v, following = rng.normal(size=(3, num, 2, 3, 3))

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.tensor(array, dtype=torch.float32)

    highest = tensor(np.full(num, levels[1]))
    step = FlowStep(tensor(x), tensor(v), tensor(levels[:-1]), tensor(levels[1:]), highest)
    return step, x, v, following


def rate_of(kind: str, sigma: float, max_sigma: float) -> float:
    """The noise for a unit of time."""
    if kind == "flow_grpo":
        return LEVEL * math.sqrt(sigma / (1 - (max_sigma if sigma == 1 else sigma)))
    return LEVEL * max_sigma * sigma if kind == "sde" else LEVEL


def by_hand(kind: str, x: np.ndarray, v: np.ndarray, sigma: float, following: float, max_sigma: float):
    """(mean, std) of one step, from the predicted clean image, the score and the drift of the reverse SDE."""
    clean, noise = x - sigma * v, x + (1 - sigma) * v
    if kind == "cps":
        std = following * math.sin(LEVEL * math.pi / 2)
        return (1 - following) * clean + math.sqrt(following**2 - std**2) * noise, std
    rate, dt = rate_of(kind, sigma, max_sigma), following - sigma
    score = -(x - (1 - sigma) * clean) / sigma**2
    return x + (v - rate**2 / 2 * score) * dt, rate * math.sqrt(-dt)


def test_the_schedule_and_its_deviations_are_those_of_the_table() -> None:
    np.testing.assert_allclose(schedule(), SIGMAS, atol=5e-7)
    step, *_ = steps()
    np.testing.assert_allclose(KERNELS["flow_grpo"](step, LEVEL).std.flatten(), DEVIATIONS, atol=5e-4, rtol=0)


def test_the_schedule_is_that_of_diffusers() -> None:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(10)
    np.testing.assert_allclose(scheduler.sigmas, SIGMAS, atol=5e-7)


@pytest.mark.parametrize("kind", STOCHASTIC)
def test_steps_equal_their_formulas(kind: str) -> None:
    step, x, v, following = steps()
    levels, found = schedule(), KERNELS[kind](step, LEVEL)
    logprobs = found.logprobs(torch.tensor(following, dtype=torch.float32))
    for i in range(9 if kind == "cps" else 10):
        mean, std = by_hand(kind, x[i], v[i], levels[i], levels[i + 1], levels[1])
        np.testing.assert_allclose(found.mean[i], mean, atol=2e-5, rtol=2e-5)
        assert found.std[i].item() == pytest.approx(std, rel=2e-5)
        if kind == "cps":
            expected = -((following[i] - mean) ** 2).mean()
        else:
            expected = Normal(torch.tensor(mean), std).log_prob(torch.tensor(following[i])).mean().item()
            rate = rate_of(kind, levels[i], levels[1])
            assert found.rate[i].item() == pytest.approx(rate, rel=2e-5)
        assert logprobs[i].item() == pytest.approx(expected, rel=2e-4)


@pytest.mark.parametrize("kind", STOCHASTIC)
def test_without_noise_every_step_is_the_ode_step(kind: str) -> None:
    step, x, v, _ = steps()
    levels = schedule()
    expected = x + v * np.diff(levels)[:, None, None, None]
    for found in (KERNELS[kind](step, 0.0), KERNELS["ddim"](step, LEVEL)):
        np.testing.assert_allclose(found.mean, expected, atol=1e-5)
        assert not found.std.any()


FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
LEVELS_BELOW_1 = (  # UniPC as Wan 2.1 and Cosmos Predict 2.5 have it, DPMSolver as Sana has it
    diffusers.UniPCMultistepScheduler(**FLOW, flow_shift=3.0),
    diffusers.UniPCMultistepScheduler(**FLOW, flow_shift=5.0),
    diffusers.UniPCMultistepScheduler(**FLOW, use_karras_sigmas=True, sigma_max=200.0, sigma_min=0.01),
    diffusers.DPMSolverMultistepScheduler(**FLOW, flow_shift=3.0),
    diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
)


@pytest.mark.parametrize("scheduler", LEVELS_BELOW_1, ids=lambda own: type(own).__name__)
@pytest.mark.parametrize(("kind", "level"), [("flow_grpo", 0.7), ("sde", 0.7), ("dance", 0.3), ("cps", 0.7)])
@pytest.mark.parametrize("num_steps", [10, 20])
def test_latents_stay_within_the_flow_where_a_schedule_begins_just_below_1(
    scheduler: Any, kind: str, level: float, num_steps: int
) -> None:
    """Along an exact velocity, images and noise of a deviation of 1: that of the latents is within 0.6 to 1.2."""
    scheduler.set_timesteps(num_steps)
    sigmas, generator = scheduler.sigmas, torch.Generator().manual_seed(0)
    clean, noise = torch.randn(2, 1, 10_000, generator=generator)
    x = (1 - sigmas[0]) * clean + sigmas[0] * noise
    for i in range(num_steps - 1):
        step = FlowStep(x, (x - clean) / sigmas[i], sigmas[i : i + 1], sigmas[i + 1 : i + 2], sigmas[1:2])
        move = KERNELS[kind](step, level)
        x = move.mean + move.std * torch.randn(x.shape, generator=generator)
        assert move.std.item() < 1.2 * level if kind != "cps" else move.std.item() < 1
        assert 0.6 < x.std().item() < 1.2, f"after step {i}"


def test_a_schedule_that_begins_at_1_has_the_published_rate_bit_for_bit() -> None:
    step, *_ = steps()
    below_1 = torch.where(step.sigmas == 1, step.max_sigmas, step.sigmas)  # flow_grpo's sd3_sde_with_logprob
    assert step.sigmas[0] == 1
    assert torch.equal(
        KERNELS["flow_grpo"](step, LEVEL).rate.flatten(), LEVEL * torch.sqrt(step.sigmas / (1 - below_1))
    )


def test_an_ode_step_has_no_density() -> None:
    step, *_ = steps()
    with pytest.raises(ValueError, match="a ddim step has no density"):
        KERNELS["ddim"](step, LEVEL).logprobs(step.latents)


@pytest.mark.parametrize("kind", ("flow_grpo", "sde", "dance"))
def test_a_model_that_is_right_keeps_the_marginals(kind: str) -> None:
    """x0 is N(2, 0.5^2) and the velocity exact: after many small steps mean and deviation are those of the flow."""
    generator, num, levels = torch.Generator().manual_seed(0), 50_000, torch.linspace(0.8, 0.4, 201)

    def deviation(sigma: float) -> float:
        return math.sqrt(((1 - sigma) * 0.5) ** 2 + sigma**2)

    x = 2 * 0.2 + deviation(0.8) * torch.randn(num, 1, generator=generator)
    for sigma, following in zip(levels[:-1].tolist(), levels[1:].tolist(), strict=True):
        clean = 2 + (1 - sigma) * 0.25 / deviation(sigma) ** 2 * (x - 2 * (1 - sigma))  # E[x0 | x]
        rows = [torch.full((num,), value) for value in (sigma, following, 0.9)]
        move = KERNELS[kind](FlowStep(x, (x - clean) / sigma, *rows), 0.3)
        x = move.mean + move.std * torch.randn(num, 1, generator=generator)
    assert x.mean().item() == pytest.approx(2 * 0.6, abs=0.015)
    assert x.std().item() == pytest.approx(deviation(0.4), rel=0.015)


def test_cps_keeps_the_coefficients_of_image_and_noise() -> None:
    noise, fresh = torch.randn(2, 100_000, 1, generator=torch.Generator().manual_seed(0))
    rows = [torch.full((100_000,), value) for value in (0.8, 0.5, 0.9)]
    move = KERNELS["cps"](FlowStep(0.2 * 2 + 0.8 * noise, noise - 2, *rows), LEVEL)
    x = move.mean + move.std * fresh
    assert (x.mean().item(), x.std().item()) == (pytest.approx(0.5 * 2, abs=0.01), pytest.approx(0.5, abs=0.005))


def test_the_divergence_of_two_means_is_that_of_two_gaussians() -> None:
    mean, reference = torch.randn(2, 3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    std = torch.tensor([0.1, 0.7, 2.0], dtype=torch.float64)
    expected = [kl_divergence(Normal(m, s), Normal(r, s)).mean() for m, r, s in zip(mean, reference, std, strict=True)]
    torch.testing.assert_close(gaussian_kl(mean, reference, std.view(3, 1, 1)), torch.stack(expected))


def test_guidance_goes_beyond_the_conditional_velocity() -> None:
    conditional, unconditional = torch.tensor([2.0]), torch.tensor([1.0])
    assert [guided(conditional, unconditional, scale).item() for scale in (0.0, 1.0, 4.5)] == [1.0, 2.0, 5.5]


def test_the_density_has_a_gradient_for_the_velocity_and_none_for_what_was_sampled() -> None:
    step, _, _, following = steps()
    velocity, latents = step.velocity.requires_grad_(), torch.tensor(following, requires_grad=True)
    KERNELS["flow_grpo"](step, LEVEL).logprobs(latents).sum().backward()
    assert velocity.grad.abs().sum() > 0 and latents.grad is None
