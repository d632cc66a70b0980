"""Sampling settings of a request and of a served policy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from mobula.actors.samplers.base import EngineSettings
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.configs.schema import RunConfig, SamplerConfig, SamplerKind
from mobula.learner.policies.adapters import AdapterPush
from mobula.learner.policies.checkpoint.stored import pushed_manifest
from mobula.learner.policies.flow.denoising import Denoising


class ServedVersion:
    """The weight version of new requests; -1 before the first push."""

    def __init__(self) -> None:
        self.number = -1
        self._changed = asyncio.Event()

    def set(self, number: int) -> None:
        self.number = number
        self._changed.set()
        self._changed = asyncio.Event()

    async def reach(self, number: int) -> None:
        """Waits for version `number` or newer, without a deadline."""
        while self.number < number:
            await self._changed.wait()


class RunningRequests:
    """Counts the requests in flight of an engine."""

    def __init__(self) -> None:
        self._num = 0
        self._none = asyncio.Event()
        self._none.set()

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Counts one request while the body runs."""
        self._num += 1
        self._none.clear()
        try:
            yield
        finally:
            self._num -= 1
            if self._num == 0:
                self._none.set()

    async def ended(self) -> None:
        """Waits until no request is in flight, without a deadline."""
        await self._none.wait()

    async def drained(self, timeout_s: float) -> None:
        """Waits until no request is in flight, at most `timeout_s`."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._none.wait(), timeout_s)


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
