"""Denoising settings shared by sampler and policy, and the velocity that both compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor, nn

from mobula.cluster.records.actions import LatentActions
from mobula.cluster.runtime.seeds import derived_seed
from mobula.configs.schema.rollout import FlowConfig
from mobula.learner.policies.flow.families import FlowFamily, ImageSize
from mobula.learner.policies.sde import KERNELS, FlowStep, Transition

MIN_ROWS = 4  # of a forward pass; fewer are multiplied by other kernels, and a row would depend on how many there are


@dataclass(frozen=True)
class Denoising:
    """How an image is denoised.

    Steps [window_start, window_end) of the schedule are stochastic, by `kernel`; only those are decisions of the
    policy. The others follow the ODE. With a `window_size` above 0 a group has so many of them (`for_group`).
    """

    height: int  # of images
    width: int
    num_steps: int
    guidance: float  # 1: none
    kernel: str  # of learner.policies.sde.KERNELS; ddim: all steps follow the ODE, and have no likelihood
    noise_level: float
    window_start: int
    window_end: int
    dtype: str  # float32 | float16 | bfloat16: latents are rounded to it before they are scored
    window_size: int = 0  # 0: the whole window
    window_order: str = "random"  # random | progressive
    window_interval: int = 1  # weight versions between two moves of a progressive window
    num_frames: int = 1  # of a video
    evaluation_steps: int = 0  # at temperature 0; 0: num_steps

    def __post_init__(self) -> None:
        if not 0 <= self.window_start < self.window_end <= self.num_steps:
            raise ValueError(
                f"the stochastic steps [{self.window_start}, {self.window_end}) are not within the {self.num_steps} "
                "steps of the schedule"
            )
        if self.kernel == "cps" and self.window_end == self.num_steps:
            raise ValueError("the last step of cps adds no noise and cannot be scored: let the window end before it")

    @classmethod
    def of(cls, config: FlowConfig) -> Denoising:
        shared = {field.name for field in fields(cls)} - {"dtype"}
        return cls(dtype=config.latents, **config.model_dump(include=shared))

    @property
    def size(self) -> ImageSize:
        return ImageSize(self.height, self.width, self.num_frames)

    @property
    def proof(self) -> Denoising:
        """Returns the denoising that verifies a weight push: stochastic steps, even if sampling has none."""
        if self.kernel != "ddim":
            return self
        return replace(self, kernel="sde", window_start=0, window_end=max(1, self.num_steps - 1))

    @property
    def without_noise(self) -> Denoising:
        """Returns the denoising of evaluation images: by the ODE, with `evaluation_steps`."""
        if self.evaluation_steps in (0, self.num_steps):
            return self
        num = self.evaluation_steps
        return replace(self, num_steps=num, kernel="ddim", window_start=num - 1, window_end=num, window_size=0)

    def for_group(self, seed: int, version: int) -> Denoising:
        """Returns the denoising with the window of one group.

        `random`: at a place that the group's seed decides; `progressive`: it starts at the first step and moves by its
        own size after every `window_interval` versions, and begins again behind the last (MixGRPO, arXiv:2507.21802).
        """
        places = self.window_end - self.window_start - self.window_size
        if self.window_size == 0 or places <= 0:
            return self
        if self.window_order == "random":
            offset = derived_seed(seed, "window") % (places + 1)
        else:
            num = -(-places // self.window_size) + 1  # the last place may overlap the one before
            offset = min(version // self.window_interval % num * self.window_size, places)
        start = self.window_start + offset
        return replace(self, window_start=start, window_end=start + self.window_size)

    def transition(self, step: FlowStep) -> Transition:
        return KERNELS[self.kernel](step, self.noise_level)


def canary_actions(
    denoising: Denoising, shape: tuple[int, ...], sigmas: np.ndarray, timesteps: np.ndarray
) -> LatentActions:
    """Arbitrary latents of `shape` as stochastic steps of a schedule, the same on every call.

    Two models with equal scores have the same velocities there; this verifies a weight push.
    """
    index = np.arange(denoising.window_start, denoising.window_end, dtype=np.int32)
    latents = np.random.default_rng(0).standard_normal((len(index) + 1, *shape), dtype=np.float32)
    return LatentActions(latents, index, timesteps[index], sigmas)


def velocities(
    model: nn.Module,
    family: FlowFamily,
    latents: Tensor,
    timesteps: Tensor,
    conditions: Mapping[str, Tensor],
    negatives: Mapping[str, Tensor] | None,
    guidance: float,
) -> Tensor:
    """float32 [N, ...]: the velocity of each row, with guidance in one forward pass of 2N rows where it has negatives.

    A pass of few rows is padded with copies. So a row's velocity does not depend on the other rows, and a replay in
    other batches than the sampler's gives the same numbers on the same backend.
    """
    num, dtype = len(latents), next(model.parameters()).dtype

    def filled(tensor: Tensor) -> Tensor:
        return tensor if num >= MIN_ROWS else tensor[torch.arange(MIN_ROWS, device=tensor.device) % num]

    x, t = filled(latents).to(dtype), filled(timesteps)
    given = {name: filled(tensor).to(dtype) for name, tensor in conditions.items()}
    if negatives is None:
        return family.velocity(model, x, t, given, guidance)[:num].float()
    both = {name: torch.cat([filled(negatives[name]).to(dtype), tensor]) for name, tensor in given.items()}
    predictions = family.velocity(model, torch.cat([x, x]), torch.cat([t, t]), both, guidance)
    unconditional, conditional = predictions.chunk(2)
    return family.guided(conditional[:num], unconditional[:num], guidance)
