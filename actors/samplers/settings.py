"""Derives the settings of engines from configuration, checkpoint and processor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from mobula.actors.samplers.base import EngineSettings
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.configs.schema import RunConfig, SamplerConfig, SamplerKind
from mobula.learner.policies.checkpoint.pushed import pushed_manifest
from mobula.learner.policies.flow.denoising import Denoising
from mobula.learner.policies.lora import AdapterPush

ENGINE_SEED_STRIDE = 7919  # distinct seeds for the engines of a run; requests have separate seeds


class TokenIds(Protocol):
    """Token ids of a processor that an engine needs."""

    @property
    def media_token_ids(self) -> tuple[int, ...]: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def pad_token_id(self) -> int: ...


def engine_settings(
    config: RunConfig, model_folder: Path, checkpoint: Manifest, processor: TokenIds, index: int
) -> EngineSettings:
    """Returns the settings of engine `index`; `checkpoint` has the tensors of `model_folder` in engine dtype."""
    sampler, dtype = config.sampler, config.resources.dtype
    pushed = pushed_manifest(checkpoint, config)
    return EngineSettings(
        model=config.policy.model,
        dtype=dtype,
        device=config.resources.device,
        seed=config.seed + ENGINE_SEED_STRIDE * (index + 1),
        tensor_parallel=config.resources.rollout.tensor_parallel,
        max_model_len=sampler.max_model_len,
        max_num_seqs=_at_a_time(sampler),
        max_num_batched_tokens=sampler.vllm.max_num_batched_tokens,
        chunk_tokens=sampler.chunk_tokens,
        max_images_per_prompt=sampler.max_images_per_prompt,
        max_videos_per_prompt=sampler.max_videos_per_prompt,
        max_audios_per_prompt=sampler.max_audios_per_prompt,
        kv_cache_bytes=sampler.vllm.kv_cache_bytes,
        memory_fraction=sampler.vllm.gpu_memory_fraction,
        sleep_level=config.resources.sleep_level if config.resources.colocated else 0,
        reports_load=config.metrics.ray and config.resources.device == "cuda",
        keeps_kv_cache=config.weight_sync.kv_cache == "keep",
        block_size=sampler.vllm.block_size,
        enforce_eager=sampler.vllm.enforce_eager,
        banned_ids=processor.media_token_ids,
        stop_ids=processor.eos_token_ids,
        pad_id=processor.pad_token_id,
        expected=pushed,
        has_unpushed=pushed.tensors != checkpoint.tensors,
        adapters=AdapterPush.of(model_folder, checkpoint, config.policy, dtype),
        served=sampler.adapters,
        denoising=Denoising.of(sampler.flow) if sampler.is_flow else None,
        image_guidance=sampler.image_tokens.guidance,
        options=sampler.kind_options,
    )


def _at_a_time(sampler: SamplerConfig) -> int:
    """Returns the maximum number of concurrent sequences or images; 0: vLLM's default, or all siblings."""
    sizes: Mapping[str, int] = {
        SamplerKind.FLOW: sampler.flow.batch_size,
        SamplerKind.IMAGE_TOKENS: sampler.image_tokens.batch_size,
    }
    return sizes.get(sampler.kind, sampler.vllm.max_num_seqs)
