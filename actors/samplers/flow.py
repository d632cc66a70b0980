"""FlowSampler: denoises images with a flow model of diffusers, and keeps the denoising steps for training."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from mobula.actors.samplers.base import EngineSettings
from mobula.actors.samplers.image_tokens import ImageRequest, ImageRow, ImageSampler, png
from mobula.cluster.errors import RolloutError
from mobula.cluster.records.actions import LatentActions, to_bfloat16
from mobula.cluster.records.media import MediaHandle, ProcessedMedia
from mobula.cluster.records.partial_response import SampledSequence
from mobula.cluster.records.trajectory import FinishReason, Prompt, WeightSpan
from mobula.learner.policies.flow.checkpoint import FlowCheckpoint
from mobula.learner.policies.flow.family import Schedule
from mobula.learner.policies.flow.policy import Denoising, FlowPolicy, StepRescoring, collate_latents, velocities
from mobula.learner.policies.loading import DTYPES
from mobula.learner.policies.sde import KERNELS, FlowStep

ROUNDED = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class DenoisingSampler(ImageSampler):
    """Denoises latents. Each image has a separate generator, so its image does not depend on the batch. At temperature
    0, and with the kernel ddim, all steps follow the ODE, and the steps of the window are stored with a log-prob of
    0."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        assert settings.denoising is not None, "the settings of this sampler say how it denoises"
        self._denoising = settings.denoising
        self._schedules: dict[int, Schedule] = {}  # number of steps -> schedule

    def _how(self, request: ImageRequest) -> Denoising:
        denoising = self._denoising if request.settings.temperature > 0 else self._denoising.without_noise
        return denoising.for_group(request.settings.seed, self._served.number)

    def _noise(self, generators: Sequence[torch.Generator], shape: Sequence[int]) -> Tensor:
        """float32 [n, ...]: of each image by its generator."""
        return torch.stack([torch.randn(shape, generator=g) for g in generators]).to(self._device)

    def _denoised(
        self,
        how: Denoising,
        latents: Tensor,
        velocity: Callable[[Tensor, Tensor], Tensor],
        noise: Callable[[], Tensor],
        *,
        is_stochastic: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Takes all steps from the first one of `how` on, where the latents are `latents` [n, ...].

        Args:
            velocity: (latents, times [n]) -> noise minus image, float32 [n, ...].

        Returns: the clean latents, those of the window [n, W + 1, ...], and log-probs [n, W].
        """
        schedule, num = self._schedules[how.num_steps], len(latents)

        def alike(value: Tensor) -> Tensor:
            return value.to(self._device).expand(num)

        sigmas = schedule.sigmas
        kept, logprobs = [], []
        for i in range(how.first_step, how.num_steps):
            moved = velocity(latents, alike(schedule.timesteps[i]))
            step = FlowStep(latents, moved, *(alike(sigmas[k]) for k in (i, i + 1, 1)))
            is_decision = how.window_start <= i < how.window_end
            if is_decision:
                kept.append(latents)
            if is_decision and is_stochastic:
                move = how.transition(step)
                latents = self._rounded(move.mean + move.std * noise())
                logprobs.append(move.logprobs(latents))
            else:
                latents = self._rounded(KERNELS["ddim"](step, 0.0).mean)
                logprobs += [torch.zeros(num)] if is_decision else []
            if i + 1 == how.window_end:
                kept.append(latents)
        return latents, torch.stack(kept, 1), torch.stack(logprobs, 1)

    def _refuse_infinite(self, latents: Tensor, how: Denoising, prompt: Prompt) -> None:
        if not latents.isfinite().all():
            raise RolloutError(
                f"prompt {prompt.prompt_id}: the latents are not finite after {how.num_steps} steps in "
                f"{how.dtype}: use float32 latents, or a smaller learning rate if the policy has diverged"
            )

    def _rounded(self, latents: Tensor) -> Tensor:
        """Rounds latents to the stored dtype; returns float32."""
        return latents.to(ROUNDED[self._denoising.dtype]).float()


def stored(latents: Tensor, dtype: str) -> np.ndarray:
    """Rounded latents as a record holds them."""
    array = latents.cpu().numpy()
    return to_bfloat16(array) if dtype == "bfloat16" else array.astype(dtype)


class FlowSampler(DenoisingSampler):
    """Denoises the images of one prompt or of several as one batch."""

    async def start(self) -> None:
        await asyncio.to_thread(self._load)

    def _load(self) -> None:
        self._checkpoint = FlowCheckpoint(self._settings.model)
        self._family = self._checkpoint.family
        self._shape = self._checkpoint.latent_shape(self._denoising)
        ways = (self._denoising, self._denoising.without_noise)
        self._schedules = {how.num_steps: self._checkpoint.schedule(how) for how in ways}
        self._num_conditions = 2 if self._checkpoint.takes_negatives(self._denoising.guidance) else 1
        dtype = DTYPES[self._settings.dtype]
        self._vae = self._checkpoint.vae(dtype).to(self._device).eval()
        self._model = self._checkpoint.transformer(dtype).to(self._device).eval()
        self._take_parameters()

    def _placed(self) -> tuple[torch.nn.Module, ...]:
        return (self._model, self._vae)

    def _kind_of(self, request: ImageRequest) -> object:
        return self._how(request), request.settings.temperature > 0, len(request.media)

    def _made(self, rows: Sequence[ImageRow]) -> list[SampledSequence]:
        first = rows[0].request
        how = self._how(first)
        generators = [row.generator for row in rows]
        given, *negatives = self._conditions([row.request for row in rows])
        noise = partial(self._noise, generators, self._shape)

        def velocity(latents: Tensor, times: Tensor) -> Tensor:
            conditions = (given, negatives[0] if negatives else None)
            return velocities(self._model, self._family, latents, times, *conditions, how.guidance)

        is_stochastic = first.settings.temperature > 0 and how.kernel != "ddim"
        schedule = self._schedules[how.num_steps]
        first_sigma = schedule.sigmas[how.first_step].to(self._device)
        start = self._rounded(self._family.first_latents(schedule.initial_std * noise(), first_sigma, given))
        latents, kept, logprobs = self._denoised(how, start, velocity, noise, is_stochastic=is_stochastic)
        self._refuse_infinite(latents, how, first.prompt)
        images = self._family.decode(self._vae, latents)
        steps, scores = stored(kept, how.dtype), logprobs.cpu().numpy()
        return [self._sequence(how, *one) for one in zip(steps, scores, images, strict=True)]

    def _sequence(
        self, how: Denoising, latents: np.ndarray, logprobs: np.ndarray, frames: np.ndarray
    ) -> SampledSequence:
        """Returns stored latents [T + 1, ...], log-probs [T] and frames uint8 [F, H, W, 3] of one sibling."""
        index = np.arange(how.window_start, how.window_end, dtype=np.int32)
        schedule = self._schedules[how.num_steps]
        timesteps, sigmas = schedule.timesteps.numpy()[index], schedule.sigmas.numpy()
        actions = LatentActions(latents, index, timesteps, sigmas)
        spans = (WeightSpan(self._served.number, 0, len(index)),)
        return SampledSequence(actions, logprobs.astype(np.float32), spans, FinishReason.STOP, tuple(map(png, frames)))

    def _conditions(self, requests: Sequence[ImageRequest]) -> list[dict[str, Tensor]]:
        """Returns conditions of the prompts and, with guidance, of the negative prompts; a row a request."""
        wanted = self._num_conditions
        for request in requests:
            if len(request.media) != wanted:
                raise RolloutError(
                    f"prompt {request.prompt.prompt_id} has {len(request.media)} conditions, and {wanted} are needed"
                )
        return [
            {
                name: torch.from_numpy(np.concatenate([r.media[n].inputs[name] for r in requests])).to(self._device)
                for name in requests[0].media[n].inputs
            }
            for n in range(wanted)
        ]

    @torch.no_grad()
    def _prompt_logprobs(self, prompt: Prompt, media: Sequence[ProcessedMedia]) -> np.ndarray:
        """Returns float32 [T], log-probs of arbitrary steps, which depend on all pushed weights."""
        how = self._denoising.proof
        batch = collate_latents([self._checkpoint.canary(prompt, how)], _AtHand(media), self._device)
        return FlowPolicy(self._model, self._family)(batch, StepRescoring(how, "none")).logprobs[0].cpu().numpy()

    @torch.no_grad()
    def _work_a_little(self) -> None:
        self._family.decode(self._vae, torch.zeros((1, *self._shape), device=self._device))


class _AtHand:
    def __init__(self, media: Sequence[ProcessedMedia]) -> None:
        self._media = media

    def read(self, handles: Sequence[MediaHandle]) -> list[ProcessedMedia]:
        return list(self._media)
