"""ImagePatchSampler: an autoregressive decoder whose continuous tokens a flow head denoises."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from mobula.actors.samplers.flow import DenoisingSampler, stored
from mobula.actors.samplers.image_tokens import ImageRequest, ImageRow, png
from mobula.cluster.records.actions import PatchActions
from mobula.cluster.records.media import ProcessedMedia
from mobula.cluster.records.partial_response import SampledSequence
from mobula.cluster.records.trajectory import FinishReason, Prompt, WeightSpan
from mobula.learner.policies.flow.codec import ImageCodec, normalised
from mobula.learner.policies.flow.patches import (
    VRL,
    PatchModel,
    PatchSequence,
    canary_patches,
    codec_folder,
    collate_patches,
    grid_of,
    head_velocities,
    negative_ids,
    patch_policy,
    patch_schedule,
)
from mobula.learner.policies.flow.policy import Denoising, StepRescoring
from mobula.learner.policies.loading import DTYPES, load_model

HEAD_ROWS = 4096  # rows of the flow head at a time, when steps are scored


class ImagePatchSampler(DenoisingSampler):
    """Samples the images of prompts of one length as one batch, token by token.

    The recorded log-probs are those of the learner's computation: when an image is complete, one teacher-forced pass
    scores its steps. The pass that sampled differs from it by rounding, because it reads a cache.
    """

    _model: PatchModel

    async def start(self) -> None:
        await asyncio.to_thread(self._load)

    def _load(self) -> None:
        settings, sampler = self._settings, self._settings.sampler
        dtype = DTYPES[settings.dtype]
        model = load_model(settings.model, dtype, "sdpa")
        assert isinstance(model, PatchModel)
        self._model = model.to(self._device).eval()  # type: ignore[arg-type]  # transformers: `to` is no method to mypy
        self._grid = grid_of(settings.model, self._denoising.size)
        self._codec = ImageCodec(codec_folder(settings.model), model.config.latent_patch_size, dtype)
        self._codec.vae.to(self._device)
        self._negative = torch.from_numpy(
            negative_ids(settings.model, sampler.flow.negative_prompt, self._denoising.size)
        )
        ways = (self._denoising, self._denoising.without_noise)
        self._schedules = {how.num_steps: patch_schedule(how.num_steps, sampler.image_patches) for how in ways}
        self._policy = patch_policy(self._model, settings.model, sampler, HEAD_ROWS)
        self._take_parameters()

    def _placed(self) -> tuple[torch.nn.Module, ...]:
        return (self._model, self._codec.vae)

    def _kind_of(self, request: ImageRequest) -> object:
        return self._how(request), request.settings.temperature > 0, request.prompt.num_tokens

    def _made(self, rows: Sequence[ImageRow]) -> list[SampledSequence]:
        first, num = rows[0].request, len(rows)
        how, generators = self._how(first), [row.generator for row in rows]
        is_stochastic = first.settings.temperature > 0 and how.kernel != "ddim"
        prompts = np.stack([row.request.prompt.expanded_ids for row in rows])
        branches = [_Branch(self._model, torch.from_numpy(prompts).long().to(self._device))]
        if how.guidance != 1:
            branches.append(_Branch(self._model, self._negative.long().to(self._device).expand(num, -1)))
        noise = partial(self._noise, generators, (self._grid.size,))
        tokens, steps = [], []
        for _ in range(self._grid.num_tokens):
            given, *without = [branch.condition() for branch in branches]
            velocity = partial(self._velocity, given, without[0] if without else None, how)
            start = self._rounded(noise())
            token, kept, _ = self._denoised(how, start, velocity, noise, is_stochastic=is_stochastic)
            if how.kernel == VRL:
                kept[:, 0] = start
            if self._settings.sampler.image_patches.normalise:
                token = self._rounded(normalised(token))
            for branch in branches:
                branch.follow(token)
            tokens.append(token)
            steps.append(kept)
        drawn, points = torch.stack(tokens, 1), torch.stack(steps, 2)  # [n, L, D], [n, W + 1, L, D]
        self._refuse_infinite(drawn, how, first.prompt)
        images = self._codec.decode(drawn, self._grid.rows)
        columns = zip(stored(points, how.dtype), stored(drawn, how.dtype), strict=True)
        actions = [self._actions(how, *column) for column in columns]
        logprobs = np.zeros((num, actions[0].num_steps), dtype=np.float32)
        if is_stochastic:
            scored = [PatchSequence.of_response(row.request.prompt, a) for row, a in zip(rows, actions, strict=True)]
            logprobs = self._scores(scored, how)
        return [self._sequence(*one) for one in zip(actions, logprobs, images, strict=True)]

    def _velocity(
        self, given: Tensor, without: Tensor | None, how: Denoising, latents: Tensor, times: Tensor
    ) -> Tensor:
        return head_velocities(self._model, latents, times, given, without, how.guidance)

    def _actions(self, how: Denoising, latents: np.ndarray, tokens: np.ndarray) -> PatchActions:
        index = np.arange(how.window_start, how.window_end, dtype=np.int32)
        schedule = self._schedules[how.num_steps]
        return PatchActions(latents, index, schedule.timesteps.numpy()[index], schedule.sigmas.numpy(), tokens)

    def _scores(self, rows: Sequence[PatchSequence], how: Denoising) -> np.ndarray:
        """float32 [n, T]"""
        return self._policy(collate_patches(rows, self._device), StepRescoring(how, "none")).logprobs.cpu().numpy()

    def _sequence(self, actions: PatchActions, logprobs: np.ndarray, image: np.ndarray) -> SampledSequence:
        spans = (WeightSpan(self._served.number, 0, actions.num_steps),)
        return SampledSequence(actions, logprobs, spans, FinishReason.STOP, (png(image),))

    @torch.no_grad()
    def _prompt_logprobs(self, prompt: Prompt, media: Sequence[ProcessedMedia]) -> np.ndarray:
        """Returns float32 [T], log-probs of arbitrary steps, which depend on all pushed weights."""
        row = canary_patches(prompt, self._settings.model, self._settings.sampler)
        return self._scores([row], self._denoising.proof)[0]

    @torch.no_grad()
    def _work_a_little(self) -> None:
        _Branch(self._model, self._negative.long().to(self._device)[None]).condition()


class _Branch:
    """The decoder behind n prompts of one length, with a cache."""

    def __init__(self, model: PatchModel, ids: Tensor) -> None:
        """`ids` int64 [n, P]"""
        self._model = model
        self._cache = DynamicCache()
        self._num_tokens = 0
        self._state = self._read(model.embed_tokens(ids))

    def condition(self) -> Tensor:
        """[n, C]: of the next token."""
        return self._model.conditions(self._state, self._num_tokens)[:, 0]

    def follow(self, token: Tensor) -> None:
        """Reads the next token, float32 [n, D]."""
        self._num_tokens += 1
        self._state = self._read(self._model.image_in_projector(token[:, None].to(self._state.dtype)))

    def _read(self, embeds: Tensor) -> Tensor:
        hidden = self._model(inputs_embeds=embeds, past_key_values=self._cache, use_cache=True).last_hidden_state
        return hidden[:, -1:]
