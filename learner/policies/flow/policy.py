"""FlowPolicy: a flow model as a policy over denoising steps, its denoising settings, and the rows that it reads."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from mobula.cluster.records.actions import LatentActions
from mobula.cluster.records.media import MediaHandle, MediaSpan, ProcessedMedia
from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.runtime.seeds import derived_seed
from mobula.configs.schema.rollout import FlowConfig, first_step
from mobula.learner.policies.adapters import has_adapters, without_adapters
from mobula.learner.policies.base import Moves, Policy, PolicyOutput, Velocities, on_device
from mobula.learner.policies.flow.family import FlowFamily, ImageSize, filled
from mobula.learner.policies.sde import KERNELS, FlowStep, Transition, gaussian_kl


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
    num_images: int = 0  # condition images of a prompt
    strength: float = 1.0  # share of the schedule that is denoised, from the condition image on

    def __post_init__(self) -> None:
        if not self.first_step <= self.window_start < self.window_end <= self.num_steps:
            raise ValueError(
                f"the stochastic steps [{self.window_start}, {self.window_end}) are not within the steps "
                f"[{self.first_step}, {self.num_steps}) of the schedule"
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
    def first_step(self) -> int:
        return first_step(self.num_steps, self.strength)

    @property
    def proof(self) -> Denoising:
        """Returns the denoising that verifies a weight push: stochastic steps, even if sampling has none."""
        if self.kernel != "ddim":
            return self
        first = self.first_step
        return replace(self, kernel="sde", window_start=first, window_end=max(first + 1, self.num_steps - 1))

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
    x, t = filled(latents).to(dtype), filled(timesteps)
    given = {name: filled(tensor).to(dtype) for name, tensor in conditions.items()}
    if negatives is None:
        return family.velocity(model, x, t, given, guidance)[:num].float()
    both = {name: torch.cat([filled(negatives[name]).to(dtype), tensor]) for name, tensor in given.items()}
    predictions = family.velocity(model, torch.cat([x, x]), torch.cat([t, t]), both, guidance)
    unconditional, conditional = predictions.chunk(2)
    return family.guided(conditional[:num], unconditional[:num], guidance)


CONDITION = "condition"  # modality of a medium that holds an encoded prompt
WHERE = MediaSpan(0, 0)  # of a condition: it stands at no token


class Reader(Protocol):
    """Source of conditions: a `MediaReader`, or media in memory."""

    def read(self, handles: Sequence[MediaHandle]) -> list[ProcessedMedia]: ...


class _FlowRow:
    """What rows of flow models have in common: no tokens of a prompt, and conditions that come encoded."""

    num_prompt_tokens = 0
    num_media_tokens = 0

    @property
    def num_tokens(self) -> int:
        raise NotImplementedError

    @property
    def answers(self) -> tuple[int, ...]:
        return (self.num_tokens,)


@dataclass(frozen=True)
class LatentSequence(_FlowRow):
    """One row: all denoising steps of a trajectory are scored.

    `media` are the encoded prompt and, with guidance, the encoded negative prompt.
    """

    actions: LatentActions
    media: tuple[MediaHandle, ...]
    old: np.ndarray | None = None  # float32 [T, ...]: means of the steps, of the weights that a step trains from

    @classmethod
    def of_response(cls, prompt: Prompt, actions: LatentActions) -> LatentSequence:
        return cls(actions, condition_of(prompt))

    @property
    def num_targets(self) -> int:
        return self.actions.num_steps

    @property
    def num_tokens(self) -> int:
        """Positions of the latent image in all steps: the row's share of `learner.tokens_per_microbatch`."""
        return self.num_targets * int(np.prod(self.actions.latents.shape[2:]))

    @property
    def num_predictions(self) -> int:
        return self.num_targets

    def with_old(self, old: np.ndarray) -> LatentSequence:
        return replace(self, old=old)


def condition_of(prompt: Prompt) -> tuple[MediaHandle, ...]:
    """The encoded prompt and, with guidance, the encoded negative prompt."""
    kinds = [handle.modality for handle in prompt.media]
    if kinds not in ([CONDITION], [CONDITION, CONDITION]):
        raise ValueError(
            f"prompt {prompt.prompt_id} has the media {kinds}: denoising steps need its encoded text, and with "
            "guidance that of the negative prompt"
        )
    return prompt.media


@dataclass(frozen=True)
class LatentBatch:
    """B rows of at most T steps, N steps in all, in the order of `target_mask`."""

    latents: Tensor  # float32 [N, ...]: before each step
    next_latents: Tensor  # float32 [N, ...]: after each step
    timesteps: Tensor  # float32 [N]
    sigmas: Tensor  # float32 [N]: noise levels before each step
    next_sigmas: Tensor  # float32 [N]: and after it
    max_sigmas: Tensor  # float32 [N]: the second level of the schedule, see `mobula.learner.policies.sde`
    target_mask: Tensor  # bool [B, T]: False behind a row's last step
    target_rows: Tensor  # int64 [N]: where they are in [B, T]
    target_columns: Tensor  # int64 [N]
    conditions: dict[str, Tensor]  # forward() argument -> all unique conditions along axis 0
    condition_rows: Tensor  # int64 [N]: the condition of each step
    negative_rows: Tensor | None  # int64 [N]: its negative prompt; None without guidance
    old_means: Tensor | None = None  # float32 [N, ...]

    def padded(self, values: Tensor) -> Tensor:
        """[N] of the steps -> [B, T], 0 or False behind a row's last step; by index, as in `TokenBatch.padded`."""
        return values.new_zeros(self.target_mask.shape).index_put((self.target_rows, self.target_columns), values)


def collate_latents(sequences: Sequence[LatentSequence], reader: Reader, device: torch.device) -> LatentBatch:
    """Concatenates the steps of all rows and resolves their conditions; each unique condition is read once."""
    conditions, indices = _conditions([handle for s in sequences for handle in s.media], reader, device)
    num_steps = [s.num_targets for s in sequences]
    of_step = np.repeat([indices[s.media[0].key] for s in sequences], num_steps)
    has_negatives = len(sequences[0].media) == 2
    negatives = np.repeat([indices[s.media[-1].key] for s in sequences], num_steps) if has_negatives else None
    return LatentBatch(
        **step_columns(sequences, device),
        conditions=conditions,
        condition_rows=on_device(of_step, device),
        negative_rows=None if negatives is None else on_device(negatives, device),
    )


def step_columns(sequences: Sequence[LatentSequence], device: torch.device) -> dict[str, Any]:
    """Returns the fields of a `LatentBatch` that do not depend on conditions."""
    num_steps = np.array([s.num_targets for s in sequences])
    target_mask = np.arange(max(1, num_steps.max())) < num_steps[:, None]
    rows, columns = np.nonzero(target_mask)
    steps, sigmas = [s.actions.scored() for s in sequences], [s.actions.sigmas for s in sequences]
    old = [s.old for s in sequences if s.old is not None]

    column = partial(_column, device=device)
    return {
        "latents": column([s.before for s in steps]),
        "next_latents": column([s.after for s in steps]),
        "timesteps": column([s.timesteps for s in steps]),
        "sigmas": column([levels[s.index] for s, levels in zip(steps, sigmas, strict=True)]),
        "next_sigmas": column([levels[s.index + 1] for s, levels in zip(steps, sigmas, strict=True)]),
        "max_sigmas": column([np.full(len(s.index), levels[1]) for s, levels in zip(steps, sigmas, strict=True)]),
        "target_mask": on_device(target_mask, device),
        "target_rows": on_device(rows, device),
        "target_columns": on_device(columns, device),
        "old_means": column(old) if len(old) == len(sequences) else None,
    }


def _conditions(
    handles: Sequence[MediaHandle], reader: Reader, device: torch.device
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """forward() argument -> all unique conditions along axis 0, and the index of each by its key."""
    unique = {handle.key: handle for handle in handles}
    media = reader.read(list(unique.values()))
    inputs = {name: on_device(np.concatenate([m.inputs[name] for m in media]), device) for name in media[0].inputs}
    return inputs, {key: index for index, key in enumerate(unique)}


def _column(arrays: Sequence[np.ndarray], device: torch.device) -> Tensor:
    return on_device(np.concatenate(arrays).astype(np.float32), device)


@dataclass(frozen=True)
class Noising:
    """x = (1 - sigma) clean + sigma noise, for `num_draws` levels sigma of each image.

    `uniform` draws a level of the table as likely as any other. `logit_normal` draws more in the middle of it: the
    place in the table is the sigmoid of a normal number (Stable Diffusion 3, arXiv:2403.03206).
    """

    sigmas: np.ndarray  # float32 [L], falling: levels to draw from
    timesteps: np.ndarray  # float32 [L]: the time of each, as the model takes it
    draw: Literal["uniform", "logit_normal"]
    num_draws: int
    num_tokens: int = 0  # above 0: each token of an image has a level

    def levels(self, generator: torch.Generator) -> Tensor:
        """int64 [K], or [K, L] with tokens: drawn places in the table."""
        num, shape = len(self.sigmas), (self.num_draws, self.num_tokens)[: 2 if self.num_tokens else 1]
        if self.draw == "uniform":
            return torch.randint(0, num, shape, generator=generator)
        shares = torch.sigmoid(torch.randn(shape, generator=generator))
        return (shares * num).long().clamp(max=num - 1)


@dataclass(frozen=True)
class CleanSequence(_FlowRow):
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
        return cls(clean, condition_of(prompt), noising, zlib.crc32(np.ascontiguousarray(clean).tobytes()))

    @property
    def num_targets(self) -> int:
        """1: an image is one decision."""
        return 1

    @property
    def num_tokens(self) -> int:
        return self.noising.num_draws * int(np.prod(self.clean.shape[1:]))

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
    sigmas: Tensor  # float32 [N], or [N, L] with a level for each token
    timesteps: Tensor  # float32, in the shape of `sigmas`
    conditions: dict[str, Tensor]  # forward() argument -> all unique conditions along axis 0
    condition_rows: Tensor  # int64 [N]
    old: Tensor | None  # float32 [N, ...]
    num_draws: int  # K

    @property
    def noised(self) -> Tensor:
        """Returns float32 [N, ...]: the input of the model."""
        return (1 - self.wide_sigmas) * self.clean + self.wide_sigmas * self.noise

    @property
    def wide_sigmas(self) -> Tensor:
        """`sigmas` with as many axes as `clean`."""
        return self.sigmas.view(*self.sigmas.shape, *(1,) * (self.clean.ndim - self.sigmas.ndim))


def collate_noised(sequences: Sequence[CleanSequence], reader: Reader, device: torch.device) -> NoisedBatch:
    """Draws levels and noise of each image and resolves conditions; each unique condition is read once."""
    conditions, indices = _conditions([s.media[0] for s in sequences], reader, device)
    num_draws = sequences[0].noising.num_draws
    return NoisedBatch(
        **noised_columns(sequences, device),
        conditions=conditions,
        condition_rows=on_device(np.repeat([indices[s.media[0].key] for s in sequences], num_draws), device),
    )


def noised_columns(sequences: Sequence[CleanSequence], device: torch.device) -> dict[str, Any]:
    """Returns the fields of a `NoisedBatch` that do not depend on conditions."""
    num_draws = sequences[0].noising.num_draws
    levels, noise = [], []
    for s in sequences:
        generator = torch.Generator().manual_seed(s.seed)
        levels.append(s.noising.levels(generator).numpy())
        noise.append(torch.randn((num_draws, *s.clean.shape), generator=generator))
    old = [s.old for s in sequences if s.old is not None]

    column = partial(_column, device=device)
    return {
        "clean": column([np.broadcast_to(s.clean, (num_draws, *s.clean.shape)) for s in sequences]),
        "noise": on_device(torch.cat(noise).numpy(), device),
        "sigmas": column([s.noising.sigmas[level] for s, level in zip(sequences, levels, strict=True)]),
        "timesteps": column([s.noising.timesteps[level] for s, level in zip(sequences, levels, strict=True)]),
        "old": column(old) if len(old) == len(sequences) else None,
        "num_draws": num_draws,
    }


@dataclass(frozen=True)
class StepRescoring:
    """Settings for rescoring stored steps.

    `divergence` is the KL divergence to the model without its adapters: `exact`, or `per_time`, which does not depend
    on the size of the steps (`mobula.learner.policies.sde.gaussian_kl`).
    """

    denoising: Denoising
    divergence: Literal["none", "exact", "per_time"]


class FlowPolicy(Policy):
    """Scores denoising steps, given the latents before each step and the encoded prompt."""

    def __init__(self, model: nn.Module, family: FlowFamily) -> None:
        super().__init__()
        self.model = model
        self._family = family

    def blocks(self) -> Iterator[nn.Module]:
        kinds = getattr(self.model, "_no_split_modules", None) or ()
        return (module for module in self.model.modules() if type(module).__name__ in kinds)

    def forward(
        self, batch: LatentBatch | NoisedBatch, replay: StepRescoring, *, entropy_has_gradient: bool = False
    ) -> PolicyOutput:
        """Log-probs of the batch's steps, all N of them side by side, and their divergence where it is asked for. Of
        clean images: velocities at their noise levels, without guidance, and log-probs of 0.

        The entropy is that of one number of the latents. It depends on the schedule alone, so it has no gradient.
        """
        if isinstance(batch, NoisedBatch):
            return self._at_levels(batch, replay)
        moved = self._transition(batch, replay.denoising)
        entropy = (torch.log(moved.std) + 0.5 * math.log(2 * math.pi * math.e)).flatten()
        output = PolicyOutput(
            batch.padded(moved.logprobs(batch.next_latents)),
            batch.padded(entropy.detach()),
            batch.padded(torch.zeros_like(entropy, dtype=torch.bool)),
            predicted=moved.mean.detach(),
            moves=_moves(moved, batch),
        )
        if replay.divergence == "none":
            return output
        with self._as_reference():
            reference = self._transition(batch, replay.denoising)
        scale = moved.std if replay.divergence == "exact" else moved.rate
        return output._replace(divergence=batch.padded(gaussian_kl(moved.mean, reference.mean, scale)))

    def _at_levels(self, batch: NoisedBatch, replay: StepRescoring) -> PolicyOutput:
        """`divergence` is the mean over levels and numbers of (v - reference v)^2."""
        velocity = self._velocity(batch)
        nothing = velocity.new_zeros(len(velocity) // batch.num_draws, 1)
        output = PolicyOutput(
            nothing,
            nothing,
            nothing.bool(),
            predicted=velocity.detach(),
            velocities=Velocities(
                _by_image(velocity, batch),
                None if batch.old is None else _by_image(batch.old, batch),
                _by_image(batch.clean, batch),
                _by_image(batch.noise, batch),
                _by_image(batch.wide_sigmas, batch),
            ),
        )
        if replay.divergence == "none":
            return output
        with self._as_reference():
            reference = self._velocity(batch)
        squares = _by_image((velocity - reference) ** 2, batch)
        return output._replace(divergence=squares.flatten(1).mean(1, keepdim=True))

    def _velocity(self, batch: NoisedBatch) -> Tensor:
        conditions = {name: tensor[batch.condition_rows] for name, tensor in batch.conditions.items()}
        return velocities(self.model, self._family, batch.noised, batch.timesteps, conditions, None, guidance=1)

    @contextmanager
    def _as_reference(self) -> Iterator[None]:
        """Without gradients and adapters."""
        if not has_adapters(self.model):
            raise ValueError(
                "algorithm.kl.coef is above 0, and a flow model is compared with itself without adapters: set "
                "policy.lora.rank above 0, or algorithm.kl.coef=0"
            )
        with torch.no_grad(), without_adapters(self.model):
            yield

    def _transition(self, batch: LatentBatch, denoising: Denoising) -> Transition:
        def of(rows: Tensor) -> dict[str, Tensor]:
            return {name: tensor[rows] for name, tensor in batch.conditions.items()}

        negatives = None if batch.negative_rows is None else of(batch.negative_rows)
        inputs = (batch.latents, batch.timesteps, of(batch.condition_rows), negatives)
        velocity = velocities(self.model, self._family, *inputs, denoising.guidance)
        step = FlowStep(batch.latents, velocity, batch.sigmas, batch.next_sigmas, batch.max_sigmas)
        return denoising.transition(step)


def _moves(moved: Transition, batch: LatentBatch) -> Moves:
    drift = None if batch.old_means is None else gaussian_kl(moved.mean, batch.old_means, moved.std)
    return Moves(
        batch.padded(moved.std.flatten().detach()),
        batch.padded(batch.sigmas - batch.next_sigmas),
        None if drift is None else batch.padded(drift),
    )


def _by_image(values: Tensor, batch: NoisedBatch) -> Tensor:
    """[N, ...] -> [B, K, ...]"""
    return values.unflatten(0, (-1, batch.num_draws))
