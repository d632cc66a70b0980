"""Clean images at sampled noise levels, for training of flow models without step likelihoods."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from mobula.cluster.records.actions import LatentActions
from mobula.cluster.records.media import MediaHandle
from mobula.cluster.records.trajectory import Prompt
from mobula.learner.policies.device_copies import on_device
from mobula.learner.policies.flow.rows import Reader, condition_of

LevelDraw = Literal["uniform", "logit_normal"]


@dataclass(frozen=True)
class Noising:
    """x = (1 - sigma) clean + sigma noise, for `num_draws` levels sigma of each image.

    `uniform` draws a level of the table as likely as any other. `logit_normal` draws more in the middle of it: the
    place in the table is the sigmoid of a normal number (Stable Diffusion 3, arXiv:2403.03206).
    """

    sigmas: np.ndarray  # float32 [L], falling: levels to draw from
    timesteps: np.ndarray  # float32 [L]: the time of each, as the model takes it
    draw: LevelDraw
    num_draws: int

    def levels(self, generator: torch.Generator) -> Tensor:
        """int64 [K]: drawn places in the table."""
        num = len(self.sigmas)
        if self.draw == "uniform":
            return torch.randint(0, num, (self.num_draws,), generator=generator)
        shares = torch.sigmoid(torch.randn(self.num_draws, generator=generator))
        return (shares * num).long().clamp(max=num - 1)


@dataclass(frozen=True)
class CleanSequence:
    """One row: a clean image. `seed` decides levels and noise, so every rank and every pass draws the same.

    `old` are velocities at these levels of another model: the one that sampled, or the reference.
    """

    clean: np.ndarray  # float [...]: latents
    media: tuple[MediaHandle, ...]
    noising: Noising
    seed: int
    old: np.ndarray | None = None  # float32 [K, ...]

    @classmethod
    def of_response(cls, noising: Noising, prompt: Prompt, actions: LatentActions) -> CleanSequence:
        """Returns the image at the end of some denoising steps. The seed is derived from the image."""
        clean = actions.values[-1]
        seed = zlib.crc32(np.ascontiguousarray(clean).tobytes())
        return cls(clean, condition_of(prompt), noising, seed)

    @property
    def num_targets(self) -> int:
        """1: an image is one decision."""
        return 1

    @property
    def num_tokens(self) -> int:
        return self.noising.num_draws * int(np.prod(self.clean.shape[1:]))

    @property
    def num_prompt_tokens(self) -> int:
        """0: latents have no tokens in common."""
        return 0

    @property
    def answers(self) -> tuple[int, ...]:
        return (self.num_tokens,)

    @property
    def num_media_tokens(self) -> int:
        return 0

    @property
    def num_predictions(self) -> int:
        return self.noising.num_draws

    def with_old(self, old: np.ndarray) -> CleanSequence:
        return replace(self, old=old)


@dataclass(frozen=True)
class NoisedBatch:
    """B clean images, each at K noise levels: N = B K rows, image by image."""

    clean: Tensor  # float32 [N, ...]
    noise: Tensor  # float32 [N, ...]
    sigmas: Tensor  # float32 [N]
    timesteps: Tensor  # float32 [N]
    conditions: dict[str, Tensor]  # forward() argument -> all unique conditions along axis 0
    condition_rows: Tensor  # int64 [N]
    old: Tensor | None  # float32 [N, ...]
    num_draws: int  # K

    @property
    def noised(self) -> Tensor:
        """Returns float32 [N, ...]: the input of the model."""
        sigmas = self.sigmas.view(-1, *(1,) * (self.clean.ndim - 1))
        return (1 - sigmas) * self.clean + sigmas * self.noise


def collate_noised(sequences: Sequence[CleanSequence], reader: Reader, device: torch.device) -> NoisedBatch:
    """Draws levels and noise of each image and resolves conditions; each unique condition is read once."""
    handles = list({s.media[0].key: s.media[0] for s in sequences}.values())
    media = reader.read(handles)
    indices = {handle.key: index for index, handle in enumerate(handles)}
    num_draws = sequences[0].noising.num_draws
    levels, noise = [], []
    for s in sequences:
        generator = torch.Generator().manual_seed(s.seed)
        levels.append(s.noising.levels(generator).numpy())
        noise.append(torch.randn((num_draws, *s.clean.shape), generator=generator))
    old = [s.old for s in sequences if s.old is not None]

    def column(arrays: Sequence[np.ndarray]) -> Tensor:
        return on_device(np.concatenate(arrays).astype(np.float32), device)

    return NoisedBatch(
        clean=column([np.broadcast_to(s.clean, (num_draws, *s.clean.shape)) for s in sequences]),
        noise=on_device(torch.cat(noise).numpy(), device),
        sigmas=column([s.noising.sigmas[level] for s, level in zip(sequences, levels, strict=True)]),
        timesteps=column([s.noising.timesteps[level] for s, level in zip(sequences, levels, strict=True)]),
        conditions={
            name: on_device(np.concatenate([m.inputs[name] for m in media]), device) for name in media[0].inputs
        },
        condition_rows=torch.tensor([indices[s.media[0].key] for s in sequences], device=device).repeat_interleave(
            num_draws
        ),
        old=column(old) if len(old) == len(sequences) else None,
        num_draws=num_draws,
    )
