"""The trained model by `offline.job` (a policy or a score model), and its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mobula.cluster.records.actions import Actions, LatentActions, PatchActions, TokenActions
from mobula.cluster.records.media import MediaReader
from mobula.cluster.records.trajectory import Prompt
from mobula.configs.schema import RunConfig
from mobula.learner.policies.adapters import Factors, quantise_base, save_adapters, save_pipeline_adapters
from mobula.learner.policies.attention.sequence_ranks import SequenceRanks
from mobula.learner.policies.base import Policy, PolicyRow, RowOutline
from mobula.learner.policies.batch import TokenBatch, TokenSequence, collate
from mobula.learner.policies.checkpoint import StoredWeights, save_policy, unread_policy_model
from mobula.learner.policies.flow.patches import (
    NUM_LEVELS,
    CleanPatches,
    PatchSequence,
    canary_patches,
    collate_clean_patches,
    collate_patches,
    freeze_text_head,
    patch_policy,
)
from mobula.learner.policies.flow.policy import (
    CleanSequence,
    Denoising,
    FlowPolicy,
    LatentBatch,
    LatentSequence,
    NoisedBatch,
    Noising,
    StepRescoring,
    collate_latents,
    collate_noised,
)
from mobula.learner.policies.head import PLAIN, Distribution
from mobula.learner.policies.image_tokens import ImageTokenPolicy, canary_tokens, freeze_the_rest
from mobula.learner.policies.loading import DTYPES, disable_dropout
from mobula.learner.policies.quantised import quantised_layers, rounded
from mobula.learner.policies.token import ScoreModel, TokenPolicy, unread_score_model

if TYPE_CHECKING:
    from mobula.learner.policies.flow.checkpoint import FlowCheckpoint

PolicyBatch = TokenBatch | LatentBatch | NoisedBatch  # rows as the forward of their policy takes them


@dataclass(frozen=True)
class Scoring:
    """Arguments of a policy's forward in addition to a batch, and the row of the canary."""

    training: Distribution | StepRescoring
    canary: Distribution | StepRescoring
    canary_row: Callable[[Prompt], PolicyRow]
    row: Callable[[Prompt, Any], PolicyRow]  # (prompt, actions) -> row


def unread_trained_model(config: RunConfig) -> tuple[nn.Module, StoredWeights]:
    """Builds the model on the meta device in `learner.master_dtype`, with frozen parameters marked; also returns the
    weights."""
    dtype = DTYPES[config.learner.master_dtype]
    if config.offline.job == "reward_model":
        scored, weights = unread_score_model(config.policy, dtype, config.seed)
        quantise_base(scored, config)
        return scored, weights
    if config.sampler.is_flow:
        transformer, weights = flow_checkpoint(config).unread_transformer()
        if not config.policy.dropout:
            disable_dropout(transformer)
        for name, parameter in transformer.named_parameters():
            parameter.requires_grad_(not name.startswith(config.policy.freeze))
        return transformer, weights
    model, weights = unread_policy_model(config.policy, dtype)
    quantise_base(model, config)
    if config.sampler.draws_patches:
        return freeze_text_head(model), weights
    return freeze_the_rest(model) if config.sampler.draws_tokens else model, weights


def write_dequantised(config: RunConfig, folder: Path) -> None:
    """Writes the base of `policy.quantisation` as engines and reference load it: `policy.model` with the quantised
    weights dequantised, in `resources.dtype`. Holds one tensor at a time."""
    model, weights = unread_trained_model(config)
    assert isinstance(model, PreTrainedModel), "rules refuse flow models"
    layers, numbers = quantised_layers(model), DTYPES[config.resources.dtype]

    def read() -> Iterator[tuple[str, Tensor]]:
        for name, rows in weights:
            yield name, rounded(rows[...], config.policy.quantisation, numbers) if name in layers else rows[...]

    save_policy(model, config.policy.model, folder, model.state_dict(), read(), config.resources.dtype)


def as_policy(model: nn.Module, config: RunConfig, sequence_ranks: SequenceRanks | None = None) -> Policy:
    """The module that a learner calls; `sequence_ranks` is for sequence parallelism."""
    if config.sampler.is_flow and config.offline.job != "reward_model":
        return FlowPolicy(model, flow_checkpoint(config).family)
    model = _of_tokens(model)
    if config.offline.job == "reward_model":
        return ScoreModel(model, config.learner, sequence_ranks)
    if config.sampler.draws_patches:
        return patch_policy(model, config.policy.model, config.sampler, config.learner.logprob_chunk_tokens)
    if config.sampler.draws_tokens:
        return ImageTokenPolicy(model, config.learner, config.sampler.image_tokens.guidance)
    return TokenPolicy(model, config.learner, sequence_ranks)


def scoring_of(config: RunConfig, banned_ids: tuple[int, ...]) -> Scoring:
    """How the policy of a run scores rows; `banned_ids` are never sampled."""
    canary_row: Callable[[Prompt], PolicyRow]
    if config.sampler.denoises:
        denoising = Denoising.of(config.sampler.flow)
        divergence = config.sampler.flow.divergence if config.algorithm.kl.coef > 0 else "none"
        proof = denoising.proof
        training, canary = StepRescoring(denoising, divergence), StepRescoring(proof, "none")
    if config.sampler.draws_patches:
        canary_row = partial(canary_patches, source=config.policy.model, sampler=config.sampler)
        return Scoring(training, canary, canary_row, row_of)
    if config.sampler.is_flow:
        checkpoint = flow_checkpoint(config)
        canary_row = partial(checkpoint.canary, denoising=proof)
        sigmas, timesteps = _tables(checkpoint, denoising)
        num = max(1, len(timesteps) - 1)  # the sampler's noise levels, except the last
        computed = slice(min(denoising.first_step, num - 1), num)
        noising = Noising(sigmas[computed], timesteps[computed], "uniform", config.algorithm.losses.nft.num_draws)
        clean = partial(CleanSequence.of_response, noising)
        row = row_of if config.algorithm.has_likelihood else clean
        return Scoring(training, canary, canary_row, row)
    if config.sampler.draws_tokens:
        canary_row = partial(TokenSequence.of_response, token_ids=canary_tokens(config.policy.model).numpy())
        return Scoring(Distribution(config.sampler.temperature, ()), PLAIN, canary_row, row_of)
    sampler = config.sampler
    sampled = Distribution(sampler.temperature, banned_ids, sampler.first_token_temperature)
    return Scoring(sampled, PLAIN, TokenSequence.of_prompt, row_of)


def teaching_noising(config: RunConfig, num_draws: int) -> Noising:
    """The noise levels for images of a dataset: the checkpoint's whole schedule."""
    continuous = replace(Denoising.of(config.sampler.flow), num_steps=NUM_LEVELS, strength=1.0)
    sigmas, timesteps = _tables(flow_checkpoint(config), continuous)
    return Noising(sigmas[: len(timesteps)], timesteps, "logit_normal", num_draws)


def _tables(checkpoint: FlowCheckpoint, denoising: Denoising) -> tuple[np.ndarray, np.ndarray]:
    """float32 noise levels [S + 1] and times [S]."""
    schedule = checkpoint.schedule(denoising)
    return schedule.sigmas.numpy(), schedule.timesteps.numpy()


def save_trained(
    model: nn.Module,
    config: RunConfig,
    folder: Path,
    described: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
    dtype: str = "",
) -> None:
    """Writes a checkpoint in the format of `policy.model`; `described`, `tensors` and `dtype` as in `save_policy`."""
    if config.sampler.is_flow:
        flow_checkpoint(config).save(folder, described, tensors, dtype)
    else:
        save_policy(_of_tokens(model), config.policy.model, folder, described, tensors, dtype)


def save_trained_adapters(factors: Factors, config: RunConfig, folder: Path) -> None:
    """Writes adapters for PEFT or, for a flow model, for diffusers."""
    if config.sampler.is_flow:
        save_pipeline_adapters(folder, factors, config.policy.lora)
    else:
        save_adapters(folder, factors, config.policy.lora, config.policy.model)


def _of_tokens(model: nn.Module) -> PreTrainedModel:
    assert isinstance(model, PreTrainedModel), f"{type(model).__name__} is no model of transformers"
    return model


def flow_checkpoint(config: RunConfig) -> FlowCheckpoint:
    """`policy.model` as a checkpoint of diffusers, which is imported on use."""
    from mobula.learner.policies.flow.checkpoint import FlowCheckpoint

    return FlowCheckpoint(config.policy.model)


def row_of(prompt: Prompt, actions: Actions) -> PolicyRow:
    if isinstance(actions, TokenActions):
        return TokenSequence.of_actions(prompt, actions)
    if isinstance(actions, PatchActions):
        return PatchSequence.of_response(prompt, actions)
    assert isinstance(actions, LatentActions)
    return LatentSequence.of_response(prompt, actions)


def collate_rows(rows: Sequence[PolicyRow], reader: MediaReader, device: torch.device) -> PolicyBatch:
    assert not any(isinstance(row, RowOutline) for row in rows), "a row of another rank: no content of it was fetched"
    if isinstance(rows[0], PatchSequence):
        return collate_patches(cast(Sequence[PatchSequence], rows), device)
    if isinstance(rows[0], CleanPatches):
        return collate_clean_patches(cast(Sequence[CleanPatches], rows), device)
    if isinstance(rows[0], CleanSequence):
        return collate_noised(cast(Sequence[CleanSequence], rows), reader, device)
    if isinstance(rows[0], LatentSequence):
        return collate_latents(cast(Sequence[LatentSequence], rows), reader, device)
    return collate(cast(Sequence[TokenSequence], rows), reader, device)
