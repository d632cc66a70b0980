"""The `Sampler` protocol: sample responses, report their progress, and replace weights under a version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from mobula.cluster.records.media import ProcessedMedia
from mobula.cluster.records.partial_response import Attempt, Emit, SampledSequence
from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.runtime.vitals import EngineLoad
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.cluster.weight_sync.transport import Rendezvous
from mobula.learner.policies.flow.denoising import Denoising
from mobula.learner.policies.lora import AdapterPush


@dataclass(frozen=True)
class EngineSettings:
    """Settings that a sampler starts with; the same for every engine of a run except `seed`."""

    model: str
    dtype: Literal["float32", "bfloat16"]
    device: str  # cpu | cuda
    seed: int
    tensor_parallel: int  # GPUs that the model is split over
    max_model_len: int
    max_num_seqs: int  # 0: vLLM's own default, or all siblings of a prompt
    max_num_batched_tokens: int
    chunk_tokens: int  # after so many new tokens of a response the sampler reports them
    max_images_per_prompt: int
    max_videos_per_prompt: int
    max_audios_per_prompt: int
    kv_cache_bytes: int  # 0: what vLLM measures to be left of its memory
    keeps_kv_cache: bool  # of running requests, over a push
    sleep_level: int  # of an engine that shares its device with the learner; 0: it never sleeps
    reports_load: bool  # keep account of queue, KV cache and preemptions, at a little cost a step
    block_size: int
    enforce_eager: bool
    banned_ids: tuple[int, ...]  # ids that are never sampled (image placeholders)
    stop_ids: tuple[int, ...]
    pad_id: int
    expected: Manifest  # the tensors every push of weights must carry
    has_unpushed: bool  # the checkpoint has others, which are frozen
    adapters: AdapterPush | None  # how a push of adapters is taken; None where the run has none
    memory_bytes: int = 0  # of each of its GPUs, beyond the context of its process; 0: the engine's own default
    memory_fraction: float = 0.0  # of each of its GPUs, instead of `memory_bytes`; 0: those
    denoising: Denoising | None = None  # of a flow model
    image_guidance: float = 1.0  # of a model that draws token by token
    options: Mapping[str, Any] = field(default_factory=dict)  # of a sampler that is the user's own code

    @property
    def hidden_ids(self) -> frozenset[int]:
        """The ids that are no part of a response's text: ends, padding and media."""
        return frozenset((*self.stop_ids, self.pad_id, *self.banned_ids))

    def expected_by(self, manifest: Manifest) -> Manifest:
        """The manifest that a push of `manifest` must have."""
        adapters = self.adapters_of(manifest)
        return self.expected if adapters is None else adapters.manifest

    def adapters_of(self, manifest: Manifest) -> AdapterPush | None:
        """Returns how to merge a push of `manifest` with adapters; None for a push of weights."""
        return self.adapters if self.adapters and self.adapters.is_meant_by(manifest) else None


class Sampler(Protocol):
    """An engine that samples responses and receives weights while it runs."""

    async def start(self) -> None:
        """Load the model. Must be awaited before anything else."""
        ...

    def coming(self) -> AbstractContextManager[None]:
        """Announces a prompt while the body runs, so that an idle engine waits for it and starts a larger batch."""
        ...

    async def sample(
        self,
        prompt: Prompt,
        media: Sequence[ProcessedMedia],
        settings: SamplingSettings,
        attempt: Attempt,
        emit: Emit,
    ) -> list[SampledSequence]:
        """Samples all siblings of one prompt, continuing an earlier attempt; prompts run concurrently.

        `emit` gets the new chunks and the siblings every `chunk_tokens` tokens. Tokens of the earlier attempt keep
        their log-probs and versions. If the engine serves weights older than `settings.min_version`, the prompt waits
        for a push. A sampler that runs prompts one by one ignores priorities and runs them in order of arrival.
        """
        ...

    async def prompt_logprobs(self, prompt: Prompt, media: Sequence[ProcessedMedia]) -> np.ndarray:
        """float32 [P - 1]: log-prob of each prompt token after the first, at temperature 1 without banned ids."""
        ...

    async def probe(self) -> None:
        """Samples one token of a one-token prompt, to show that the engine works; a busy engine may skip this."""
        ...

    async def sleep(self) -> None:
        """Give the device's memory back; nothing may be sampled until both parts are awake. No request is under way."""
        ...

    async def wake_up(self, tag: str) -> None:
        """Take memory again: `weights`, then `kv_cache`. At `sleep_level` 2 weights are dead until the next push."""
        ...

    def load(self) -> EngineLoad:
        """Returns the current load. Preemptions, and requests inside a core in another
        process, need `EngineSettings.reports_load`.
        """
        ...

    async def check_manifest(self, manifest: Manifest) -> None:
        """Refuse (ManifestError) a push that does not fit, before anything is sent."""
        ...

    async def join_transfer(self, rendezvous: Rendezvous, rank: int) -> None:
        """Joins a transfer group as receiver `rank` and leaves the previous group. An engine on several GPUs takes
        consecutive ranks from `rank` on, in the order of its own ranks."""
        ...

    async def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> int:
        """Pauses requests, receives a push from the transfer group, sets `version` and resumes; returns the version
        that the engine serves.

        No later request uses a cache of the old weights (KV, prefix, encoder). A running request keeps its KV only with
        `EngineSettings.keeps_kv_cache`.
        """
        ...

    async def load_weights(
        self, manifest: Manifest, bucket_bytes: int, buckets: Iterable[np.ndarray], version: int
    ) -> None:
        """Loads weights from packed buckets, for a late joiner without a transfer group. Each bucket is taken once, on
        another thread than the caller's, because it may have to be fetched."""
        ...

    async def weight_version(self) -> int: ...

    async def close(self) -> None: ...
