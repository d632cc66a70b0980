"""Models that sample images as continuous tokens: the layout of an image, the schedule, rows, and the policy.

A flow head denoises each token, given the state of the decoder. In the terms of `mobula.learner.policies.sde`, sigma is
1 - t of the time t of the head, and v = noise - token is the negative of its velocity. So the steps of a token have the
kernels, windows and divergences of flow models. Log-probs are means over the numbers of a token, except with the kernel
`vrl`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint
from transformers import AutoTokenizer

from mobula.cluster.records.actions import LatentActions, PatchActions
from mobula.cluster.records.trajectory import Prompt
from mobula.configs.schema.rollout import ImagePatchesConfig, SamplerConfig
from mobula.learner.policies.base import on_device
from mobula.learner.policies.batch import column
from mobula.learner.policies.flow.family import ImageSize, Schedule, filled, fit
from mobula.learner.policies.flow.policy import (
    CleanSequence,
    Denoising,
    FlowPolicy,
    LatentBatch,
    LatentSequence,
    NoisedBatch,
    Noising,
    canary_actions,
    noised_columns,
    step_columns,
)
from mobula.learner.policies.nextstep.model import NextStep, NextStepConfig, prompt_ids
from mobula.learner.policies.sde import KERNELS, FlowStep, Transition, guided

NUM_LEVELS = 1000  # noise levels of a nearly continuous schedule
VRL = "vrl"
PatchModel = NextStep
# Rows of attention with a remainder are computed by other kernels, and a row would depend on the others.
ALIGNMENT = 32  # the decoder's rows are padded to a multiple of it


@dataclass(frozen=True)
class PatchGrid:
    """The tokens of an image."""

    rows: int
    columns: int
    size: int  # D: numbers of a token

    @property
    def num_tokens(self) -> int:
        """L"""
        return self.rows * self.columns


def model_config(source: str) -> NextStepConfig:
    """config.json of the checkpoint at `source`."""
    return NextStepConfig.from_pretrained(source)


def codec_folder(source: str) -> Path:
    """The folder of the VAE in the checkpoint at `source`, a folder or a hub name."""
    name = model_config(source).vae_name_or_path or "vae"
    folder = (Path(source) if Path(source).is_dir() else Path(snapshot_download(source))) / name
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"policy.model={source} has no file {folder / 'config.json'}, although vae_name_or_path in its config.json "
            "names this folder: download the whole checkpoint, or write the folder of the VAE there"
        )
    return folder


def grid_of(source: str, size: ImageSize) -> PatchGrid:
    """The tokens of an image of this size. Raises: ValueError: the checkpoint does not support the size."""
    settings = json.loads((codec_folder(source) / "config.json").read_text(encoding="utf-8"))
    stages = settings.get("ch_mult") or settings["block_out_channels"]  # as released, or of diffusers
    config = model_config(source)
    side = 2 ** (len(stages) - 1) * config.latent_patch_size
    fit(size, side)
    return PatchGrid(size.height // side, size.width // side, config.token_size)


def patch_schedule(num_steps: int, config: ImagePatchesConfig) -> Schedule:
    """Noise levels and times of the released samplers.

    Times are t' = t / (s - (s - 1) t), with t from 0 to 1 in even steps; with a `last_step`, t is from 0 to
    1 - last_step, and the last of the `num_steps` steps has the length `last_step`.
    """
    last = config.last_step
    times = torch.linspace(0, 1 - last, num_steps) if last else torch.linspace(0, 1, num_steps + 1)[:-1]
    times = times / (config.shift - (config.shift - 1) * times)
    end = times[-1:] + last if last else torch.ones(1)
    return Schedule(1 - torch.cat([times, end]), times)


def teaching_levels(num_draws: int, num_tokens: int) -> Noising:
    """Logit-normal noise levels of each token."""
    schedule = patch_schedule(NUM_LEVELS, ImagePatchesConfig())
    return Noising(schedule.sigmas[:-1].numpy(), schedule.timesteps.numpy(), "logit_normal", num_draws, num_tokens)


@lru_cache(maxsize=8)
def negative_ids(source: str, text: str, size: ImageSize) -> np.ndarray:
    """int32 [P]: the prompt of the unconditional branch."""
    tokenizer, grid = AutoTokenizer.from_pretrained(source, trust_remote_code=False), grid_of(source, size)
    return np.array(ids_of(tokenizer, source, text, grid), dtype=np.int32)


def ids_of(tokenizer: Any, source: str, text: str, grid: PatchGrid) -> list[int]:
    """The prompt of an image of `grid`."""
    return prompt_ids(tokenizer, model_config(source), text, grid.rows, grid.columns)


def head_velocities(
    model: PatchModel,
    latents: Tensor,
    times: Tensor,
    conditional: Tensor,
    unconditional: Tensor | None,
    guidance: float,
) -> Tensor:
    """float32 [N, D]: noise minus token at `latents` [N, D]; with guidance in one pass of 2N rows."""
    num = len(latents)
    x, t, c = filled(latents), filled(times), filled(conditional)
    if unconditional is None:
        return -model.velocity(x, t, c)[:num]
    both = model.velocity(torch.cat([x, x]), torch.cat([t, t]), torch.cat([c, filled(unconditional)]))
    given, without = both.chunk(2)
    return -guided(given[:num], without[:num], guidance)


def integrated(latents: Tensor, num_steps: int, velocity: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """[N, D]: after all but the last of `num_steps` deterministic steps from noise `latents`."""
    sigmas = torch.linspace(1, 0, num_steps + 1, device=latents.device)
    for now, following in zip(sigmas[:-2], sigmas[1:-1], strict=True):
        rows = now.expand(len(latents))
        step = FlowStep(latents, velocity(latents, 1 - rows), rows, following.expand_as(rows), rows)
        latents = KERNELS["ddim"](step, 0.0).mean
    return latents


@dataclass(frozen=True)
class PatchSequence(LatentSequence):
    """One row: all denoising steps of all tokens of an image are scored."""

    actions: PatchActions
    _: KW_ONLY
    prompt_ids: np.ndarray  # int [P]

    @classmethod
    def of_response(cls, prompt: Prompt, actions: LatentActions) -> PatchSequence:
        assert isinstance(actions, PatchActions), "an image of continuous tokens"
        return cls(actions, (), prompt_ids=prompt.expanded_ids)

    @property
    def num_tokens(self) -> int:
        """Inputs of the decoder, and of the flow head."""
        return len(self.prompt_ids) + len(self.actions.tokens) + self.num_targets


@dataclass(frozen=True)
class CleanPatches(CleanSequence):
    """One row: an image of a data set as tokens [L, D], each at separate noise levels."""

    _: KW_ONLY
    prompt_ids: np.ndarray  # int [P]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + (1 + self.noising.num_draws) * len(self.clean)


@dataclass(frozen=True)
class PromptedTokens:
    """The decoder's inputs of B images."""

    ids: Tensor  # int64 [B, P]: prompts, padded on the right
    num_ids: Tensor  # int64 [B]
    tokens: Tensor  # float32 [B, L, D]

    @classmethod
    def of(cls, prompts: Sequence[np.ndarray], tokens: Sequence[np.ndarray], device: torch.device) -> PromptedTokens:
        lengths = on_device(np.array([len(ids) for ids in prompts], dtype=np.int64), device)
        stacked = on_device(np.stack(tokens).astype(np.float32), device)
        return cls(column(prompts, np.int64, device), lengths, stacked)

    def with_prompt(self, ids: Tensor) -> PromptedTokens:
        """The same images behind these rows, and again behind the prompt `ids` [P]."""
        num, width = len(self.ids), max(self.ids.shape[1], len(ids))
        both = self.ids.new_zeros(2 * num, width)
        both[:num, : self.ids.shape[1]] = self.ids
        both[num:, : len(ids)] = ids
        lengths = torch.cat([self.num_ids, torch.full_like(self.num_ids, len(ids))])
        return PromptedTokens(both, lengths, self.tokens.repeat(2, 1, 1))

    def states(self, model: NextStep) -> Tensor:
        """[B, L, H]: the decoder's last state before each token, in one teacher-forced pass."""
        length = self.tokens.shape[1]
        width = -(-(self.ids.shape[1] + length - 1) // ALIGNMENT) * ALIGNMENT
        columns = torch.arange(width, device=self.ids.device)
        place = columns - self.num_ids[:, None]  # [B, S]: of the token that is the input there, if not negative
        text = model.embed_tokens(pad(self.ids, (0, width - self.ids.shape[1])))
        images = model.image_in_projector(self.tokens.to(text.dtype))
        index = place.clamp(0, length - 1)[..., None].expand(-1, -1, text.shape[-1])
        embeds = torch.where((place < 0)[..., None], text, images.gather(1, index))
        hidden = model(inputs_embeds=embeds, use_cache=False).last_hidden_state
        before = self.num_ids[:, None] - 1 + torch.arange(length, device=self.ids.device)
        return hidden.gather(1, before[..., None].expand(-1, -1, hidden.shape[-1]))


@dataclass(frozen=True, kw_only=True)
class PatchBatch(LatentBatch):
    """Steps of B images; `condition_rows` index their B L tokens."""

    images: PromptedTokens


@dataclass(frozen=True, kw_only=True)
class NoisedPatches(NoisedBatch):
    """B images of data sets; `condition_rows` index the images."""

    images: PromptedTokens


def collate_patches(rows: Sequence[PatchSequence], device: torch.device) -> PatchBatch:
    actions = [row.actions for row in rows]
    window = [len(a.step_index) for a in actions]
    owners = np.arange(sum(len(a.tokens) for a in actions))
    per_token = np.concatenate([np.full(len(a.tokens), num) for a, num in zip(actions, window, strict=True)])
    return PatchBatch(
        **step_columns(rows, device),
        conditions={},
        condition_rows=on_device(np.repeat(owners, per_token), device),
        negative_rows=None,
        images=PromptedTokens.of([row.prompt_ids for row in rows], [a.token_values for a in actions], device),
    )


def collate_clean_patches(rows: Sequence[CleanPatches], device: torch.device) -> NoisedPatches:
    return NoisedPatches(
        **noised_columns(rows, device),
        conditions={},
        condition_rows=on_device(np.repeat(np.arange(len(rows)), rows[0].noising.num_draws), device),
        images=PromptedTokens.of([row.prompt_ids for row in rows], [row.clean for row in rows], device),
    )


class PatchPolicy(FlowPolicy):
    """Scores the denoising steps of tokens: one teacher-forced pass of the decoder, and the flow head at stored points.
    With the kernel `vrl` the stored point is the noise, from which all deterministic steps are taken again."""

    model: NextStep

    def __init__(self, model: NextStep, negative: np.ndarray, chunk_rows: int) -> None:
        """
        Args:
            negative: int [P], the prompt of the unconditional branch.
            chunk_rows: rows of the flow head at a time; the backward pass computes them again.
        """
        torch.nn.Module.__init__(self)
        self.model = model
        self._negative = negative.astype(np.int64)
        self._chunk_rows = chunk_rows

    def _transition(self, batch: LatentBatch, denoising: Denoising) -> Transition:
        assert isinstance(batch, PatchBatch)
        conditions = self._conditions(batch.images, denoising.guidance)
        rows = [branch.flatten(0, 1)[batch.condition_rows] for branch in conditions]
        velocity = partial(self._head, rows=rows, guidance=denoising.guidance)
        latents = batch.latents
        if denoising.kernel == VRL:
            latents = integrated(latents, denoising.num_steps, velocity)
        moved = velocity(latents, batch.timesteps)
        return denoising.transition(FlowStep(latents, moved, batch.sigmas, batch.next_sigmas, batch.max_sigmas))

    def _velocity(self, batch: NoisedBatch) -> Tensor:
        assert isinstance(batch, NoisedPatches)
        [conditions] = self._conditions(batch.images, guidance=1)
        rows = conditions[batch.condition_rows].flatten(0, 1)
        noised = batch.noised
        return self._head(noised.flatten(0, 1), batch.timesteps.flatten(), [rows], guidance=1).view_as(noised)

    def _conditions(self, images: PromptedTokens, guidance: float) -> list[Tensor]:
        """[B, L, C]: of the prompts and, with guidance, of the negative prompt."""
        if guidance == 1:
            return [self.model.conditions(images.states(self.model))]
        both = images.with_prompt(on_device(self._negative, images.ids.device))
        return list(self.model.conditions(both.states(self.model)).chunk(2))

    def _head(self, latents: Tensor, times: Tensor, rows: Sequence[Tensor], guidance: float) -> Tensor:
        """float32 [N, D]: `rows` are the conditions [N, C] of each branch."""
        inputs = [tensor.split(self._chunk_rows) for tensor in (latents, times, *rows)]

        def found(x: Tensor, t: Tensor, given: Tensor, without: Tensor | None = None) -> Tensor:
            return head_velocities(self.model, x, t, given, without, guidance)

        if len(inputs[0]) == 1:
            return found(*(parts[0] for parts in inputs))
        return torch.cat([checkpoint(found, *parts, use_reentrant=False) for parts in zip(*inputs, strict=True)])


def patch_policy(model: torch.nn.Module, source: str, sampler: SamplerConfig, chunk_rows: int) -> PatchPolicy:
    """The policy of a model of `source`."""
    assert isinstance(model, NextStep), f"{type(model).__name__} has no continuous tokens"
    size = Denoising.of(sampler.flow).size
    return PatchPolicy(model, negative_ids(source, sampler.flow.negative_prompt, size), chunk_rows)


def canary_patches(prompt: Prompt, source: str, sampler: SamplerConfig) -> PatchSequence:
    """Returns arbitrary, deterministic tokens after a prompt, which verify a weight push."""
    proof = Denoising.of(sampler.flow).proof
    grid, schedule = grid_of(source, proof.size), patch_schedule(proof.num_steps, sampler.image_patches)
    shape = (grid.num_tokens, grid.size)
    steps = canary_actions(proof, shape, schedule.sigmas.numpy(), schedule.timesteps.numpy())
    actions = PatchActions(**vars(steps), tokens=steps.latents[-1])
    return PatchSequence.of_response(prompt, actions)


def freeze_text_head(model: torch.nn.Module) -> torch.nn.Module:
    """Takes the output layer of text out of training: no image depends on it."""
    assert isinstance(model, NextStep)
    model.lm_head.requires_grad_(False)
    return model
