"""Stochastic steps of a flow model: means, standard deviations and log-probs of Gaussians, in float32.

A flow model moves x = (1 - sigma) x0 + sigma noise along the velocity v = noise - x0, from a noise level sigma to a
lower level sigma'. The ODE step x + v dt, with dt = sigma' - sigma < 0, is deterministic; the stochastic steps below
have (nearly) the same marginals, and a density. Sampler and policy share these functions, so that a replayed step has
the log-prob it was sampled with.

Sources: Flow-GRPO, arXiv:2505.05470; DanceGRPO, arXiv:2505.07818; Coefficients-Preserving Sampling, arXiv:2509.05952.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor


@dataclass(frozen=True)
class FlowStep:
    """Start and end noise level of each of N rows."""

    latents: Tensor  # [N, ...]
    velocity: Tensor  # [N, ...]
    sigmas: Tensor  # float32 [N]: of `latents`
    next_sigmas: Tensor  # float32 [N]
    max_sigmas: Tensor  # float32 [N]: the schedule's second level, which bounds the noise of the first step


@dataclass(frozen=True)
class Transition:
    """N(mean, std^2), independent for each number of the next latents."""

    mean: Tensor  # float32 [N, ...]
    std: Tensor  # float32 [N, 1, ...]: 0 for deterministic steps
    rate: Tensor  # float32 [N, 1, ...]: std = rate sqrt(-dt), or equal to std if the kernel has no dt
    logprobs: Callable[[Tensor], Tensor]  # next latents [N, ...] -> float32 [N]


Kernel = Callable[[FlowStep, float], Transition]  # (where rows go, noise level `a`) -> how they get there


def flow_grpo(step: FlowStep, level: float) -> Transition:
    """rate = a sqrt(sigma / (1 - min(sigma, max_sigma))). Source: Flow-GRPO.

    Flow-GRPO replaces a sigma of exactly 1, the start of its schedules, by max_sigma. UniPC and DPMSolver start just
    below 1, where 1 / (1 - sigma) is up to 1,000,000. Later levels are at most max_sigma.
    """
    sigmas = _wide(step.sigmas, step)
    bounded = torch.minimum(sigmas, _wide(step.max_sigmas, step))
    return _euler_maruyama(step, level * torch.sqrt(sigmas / (1 - bounded)))


def sde(step: FlowStep, level: float) -> Transition:
    """rate = a max_sigma sigma: falls with the noise. Source: flow_grpo's step for video models."""
    return _euler_maruyama(step, level * _wide(step.max_sigmas, step) * _wide(step.sigmas, step))


def dance(step: FlowStep, level: float) -> Transition:
    """rate = a, the same at every noise level. Source: DanceGRPO."""
    return _euler_maruyama(step, torch.full_like(_wide(step.sigmas, step), level))


def cps(step: FlowStep, level: float) -> Transition:
    """std = sigma' sin(a pi / 2); mean = x0 (1 - sigma') + noise sqrt(sigma'^2 - std^2), both as predicted.

    The noise in the next latents is sigma' exactly. The log-prob leaves out the scale: -mean((x' - mean)^2).
    Source: Coefficients-Preserving Sampling.
    """
    x, v = step.latents.float(), step.velocity.float()
    sigmas, following = _wide(step.sigmas, step), _wide(step.next_sigmas, step)
    std = following * math.sin(level * math.pi / 2)
    clean, noise = x - sigmas * v, x + (1 - sigmas) * v
    mean = clean * (1 - following) + noise * torch.sqrt(following**2 - std**2)
    return Transition(mean, std, std, lambda latents: -_mean((latents.detach().float() - mean) ** 2))


def langevin(step: FlowStep, level: float) -> Transition:
    """rate = a sqrt(2 sigma). At a = 1 it is the sampler of released autoregressive flow heads, which write t = 1 -
    sigma and u = -v: x' = x + ((1 + t) u - x) dt + sqrt(2 (1 - t) dt) noise."""
    return _euler_maruyama(step, level * torch.sqrt(2 * _wide(step.sigmas, step)))


def vrl(step: FlowStep, level: float) -> Transition:
    """mean = x + v dt, std = a sqrt(-dt). The log-prob is the sum over all numbers. Source: the trainer VRL, which
    takes this step after deterministic steps from a stored x0."""
    mean = ddim(step, level).mean
    std = level * torch.sqrt(_wide(step.sigmas, step) - _wide(step.next_sigmas, step))
    num = mean[0].numel()
    return Transition(mean, std, std, lambda latents: num * _normal_logprobs(mean, std, latents))


def ddim(step: FlowStep, level: float) -> Transition:
    """The ODE step, whatever the level: it has no density."""
    dt = _wide(step.next_sigmas, step) - _wide(step.sigmas, step)
    nothing = torch.zeros_like(dt)
    return Transition(step.latents.float() + step.velocity.float() * dt, nothing, nothing, _no_density)


KERNELS: dict[str, Kernel] = {
    "flow_grpo": flow_grpo,
    "sde": sde,
    "dance": dance,
    "cps": cps,
    "langevin": langevin,
    "vrl": vrl,
    "ddim": ddim,
}


def guided(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """u + g (c - u), in float32. Source: Classifier-Free Diffusion Guidance, arXiv:2207.12598."""
    return unconditional.float() + scale * (conditional.float() - unconditional.float())


def flow_level(edm_sigmas: Tensor) -> Tensor:
    """t = s / (1 + s): the noise level of (image + s noise) / (1 + s).

    EDM keeps y = image + s noise, so x = y / (1 + s) are the latents of a flow model at t.
    Source: Elucidating the Design Space of Diffusion-Based Generative Models, arXiv:2206.00364.
    """
    return edm_sigmas / (1 + edm_sigmas)


def gaussian_kl(mean: Tensor, reference_mean: Tensor, scale: Tensor) -> Tensor:
    """Returns [N]: the mean over all elements of (mean - reference mean)^2 / (2 scale^2).

    With `Transition.std` it is the KL divergence per element of two Gaussians with this deviation; with
    `Transition.rate` it is independent of the size of the step, as in Flow-GRPO.
    """
    return _mean((mean - reference_mean) ** 2 / (2 * scale**2))


def _euler_maruyama(step: FlowStep, rate: Tensor) -> Transition:
    """mean = x + (v + rate^2 / (2 sigma) (x + (1 - sigma) v)) dt, std = rate sqrt(-dt).

    -(x + (1 - sigma) v) / sigma is the score of the model's marginal at sigma.
    """
    x, v = step.latents.float(), step.velocity.float()
    sigmas = _wide(step.sigmas, step)
    dt = _wide(step.next_sigmas, step) - sigmas
    pull = rate**2 / (2 * sigmas)
    mean = x * (1 + pull * dt) + v * (1 + pull * (1 - sigmas)) * dt
    std = rate * torch.sqrt(-dt)
    return Transition(mean, std, rate, partial(_normal_logprobs, mean, std))


def _normal_logprobs(mean: Tensor, std: Tensor, latents: Tensor) -> Tensor:
    """[N]: mean over the latents' numbers of ln N(x'; mean, std^2). No gradient enters `latents`."""
    squares = _mean((latents.detach().float() - mean) ** 2)
    std = std.flatten()
    return -squares / (2 * std**2) - torch.log(std) - 0.5 * math.log(2 * math.pi)


def _no_density(latents: Tensor) -> Tensor:
    raise ValueError("a ddim step has no density: score steps of flow_grpo, sde, dance or cps")


def _wide(values: Tensor, step: FlowStep) -> Tensor:
    """[N] as [N, 1, ...], to go with the latents."""
    return values.float().reshape(-1, *(1,) * (step.latents.ndim - 1))


def _mean(values: Tensor) -> Tensor:
    return values.flatten(1).mean(1)
