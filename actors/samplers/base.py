"""The `Sampler` protocol, and the settings of an engine: samples responses, and replaces weights under a version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from mobula.cluster.errors import ManifestError
from mobula.cluster.records.media import ProcessedMedia
from mobula.cluster.records.partial_response import Attempt, Emit, SampledSequence
from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.roles import PromptScores, SamplingSettings
from mobula.cluster.runtime.vitals import EngineLoad
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.cluster.weight_sync.transport import Rendezvous
from mobula.configs.schema import RunConfig, SamplerConfig, SamplerKind
from mobula.learner.policies.adapters import AdapterPush
from mobula.learner.policies.checkpoint import pushed_manifest
from mobula.learner.policies.flow.policy import Denoising


@dataclass(frozen=True)
class EngineSettings:
    """Start-up settings of a sampler. All engines of a run have equal settings, except `seed`."""

    model: str
    dtype: Literal["float32", "bfloat16"]
    device: str  # cpu | cuda
    seed: int
    tensor_parallel: int  # number of GPUs per engine
    sampler: SamplerConfig
    max_num_seqs: int  # 0: vLLM's default, or all siblings of a prompt
    kv_cache_bytes: int  # 0: vLLM measures the free part of its memory
    keeps_kv_cache: bool  # running requests keep their KV cache during a push
    sleep_level: int  # for an engine on the device of the learner; 0: never sleeps
    reports_load: bool  # reports queue, KV cache and preemptions, at a small cost per step
    banned_ids: tuple[int, ...]  # ids that are never sampled (image placeholders)
    stop_ids: tuple[int, ...]
    pad_id: int
    expected: Manifest  # tensors of a complete push of weights
    has_unpushed: bool  # the checkpoint also has frozen tensors, which are not pushed
    adapters: AdapterPush | None  # how to merge pushed adapters; None in runs without adapters
    memory_bytes: int = 0  # per GPU, without the context of the process; 0: the engine's default
    denoising: Denoising | None = None  # for samplers that denoise

    @property
    def hidden_ids(self) -> frozenset[int]:
        """Ids without text in a response: stop, padding and media tokens."""
        return frozenset((*self.stop_ids, self.pad_id, *self.banned_ids))

    def expected_by(self, manifest: Manifest) -> Manifest:
        """Returns the required manifest for a push of `manifest`: of weights or of adapters. Raises: ManifestError: the
        engine serves adapters beside a frozen base."""
        if self.sampler.adapters.are_on:
            raise ManifestError(
                f"sampler.adapters.max_served={self.sampler.adapters.max_served} freezes the base weights, and a run "
                "pushes new ones: set it to 0"
            )
        adapters = self.adapters_of(manifest)
        return self.expected if adapters is None else adapters.manifest

    def adapters_of(self, manifest: Manifest) -> AdapterPush | None:
        """Returns how to merge a push of `manifest` with adapters; None for a push of weights."""
        return self.adapters if self.adapters and self.adapters.is_meant_by(manifest) else None


class Sampler(Protocol):
    """An engine that samples responses and receives weights while it runs."""

    async def start(self) -> None:
        """Loads the model. Must be awaited before any other call."""

    def coming(self) -> AbstractContextManager[None]:
        """Announces a prompt while the body runs, so that an idle engine waits for it and starts a larger batch."""

    async def sample(
        self, prompt: Prompt, media: Sequence[ProcessedMedia], settings: SamplingSettings, attempt: Attempt, emit: Emit
    ) -> list[SampledSequence]:
        """Samples all siblings of one prompt, continuing an earlier attempt; prompts run concurrently.

        `emit` gets the new chunks and the siblings every `chunk_tokens` tokens. Tokens of the earlier attempt keep
        their log-probs and versions. If the engine serves weights older than `settings.min_version`, the prompt waits
        for a push. A sampler that runs prompts one by one ignores priorities and runs them in order of arrival.
        """

    async def prompt_logprobs(self, prompt: Prompt, media: Sequence[ProcessedMedia]) -> np.ndarray:
        """Returns float32 [P - 1], log-probs of the prompt tokens after the first, at temperature 1 without bans."""

    async def probe(self) -> None:
        """Samples one token of a one-token prompt, to show that the engine works; a busy engine may skip this."""

    async def sleep(self) -> None:
        """Frees device memory. Requires no request in flight; sampling requires `wake_up` of both parts."""

    async def wake_up(self, tag: str) -> None:
        """Allocates `weights`, then `kv_cache`. After `sleep_level` 2 the weights are invalid until the next push."""

    def load(self) -> EngineLoad:
        """Returns the current load. Preemptions, and requests in a core in another process, need
        `EngineSettings.reports_load`."""

    async def check_manifest(self, manifest: Manifest) -> None:
        """Raises `ManifestError` for a push that does not fit, before data are sent."""

    async def join_transfer(self, rendezvous: Rendezvous, rank: int) -> None:
        """Joins a transfer group as receiver `rank` and leaves the previous group. The ranks of an engine on several
        GPUs have consecutive group ranks, starting with `rank`."""

    async def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> int:
        """Pauses requests, receives a push from the transfer group, sets `version` and resumes; returns the version
        that the engine serves. No later request uses a cache of the old weights (KV, prefix, encoder). A running
        request keeps its KV only with `EngineSettings.keeps_kv_cache`."""

    async def load_weights(
        self, manifest: Manifest, bucket_bytes: int, buckets: Iterable[np.ndarray], version: int
    ) -> None:
        """Loads weights from packed buckets, for a late joiner without a transfer group. Iterates `buckets` once on
        another thread, because a bucket may have to be fetched."""

    async def weight_version(self) -> int: ...

    async def close(self) -> None: ...


class AdapterSampler(Sampler, Protocol):
    """A sampler that serves adapters beside a frozen base model: `SamplingSettings.adapter` names the weights."""

    async def serve(self, adapter: str, folder: Path) -> None:
        """Loads an adapter in PEFT's format, once. The folder must exist until the adapter is withdrawn. Raises:
        ValueError: the name or all places are taken, or the adapter does not fit."""

    async def withdraw(self, adapter: str) -> None:
        """Refuses new requests of an adapter, waits for its running ones, and frees its memory. Raises: ValueError: it
        is not served."""

    async def score_prompt(
        self, prompt: Prompt, media: Sequence[ProcessedMedia], *, adapter: str | None, num_top: int
    ) -> PromptScores:
        """Computes the log-probs of a prompt, and of the `num_top` likeliest tokens at each position. Raises:
        ValueError: the adapter is not served."""


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
    sizes: Mapping[str, int] = {
        SamplerKind.FLOW: sampler.flow.batch_size,
        SamplerKind.IMAGE_PATCHES: sampler.flow.batch_size,
        SamplerKind.IMAGE_TOKENS: sampler.image_tokens.batch_size,
    }
    return EngineSettings(
        model=config.policy.model,
        dtype=dtype,
        device=config.resources.device,
        seed=config.seed + ENGINE_SEED_STRIDE * (index + 1),
        tensor_parallel=config.resources.rollout.tensor_parallel,
        sampler=sampler,
        max_num_seqs=sizes.get(sampler.kind, sampler.vllm.max_num_seqs),
        kv_cache_bytes=sampler.vllm.kv_cache_bytes,
        sleep_level=config.resources.sleep_level if config.resources.colocated else 0,
        reports_load=config.metrics.ray and config.resources.device == "cuda",
        keeps_kv_cache=config.weight_sync.kv_cache == "keep",
        banned_ids=processor.media_token_ids,
        stop_ids=processor.eos_token_ids,
        pad_id=processor.pad_token_id,
        expected=pushed,
        has_unpushed=pushed.tensors != checkpoint.tensors,
        adapters=AdapterPush.of(model_folder, checkpoint, config.policy, dtype),
        denoising=Denoising.of(sampler.flow) if sampler.denoises else None,
    )
