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
    max_num_seqs: int  # 0: vLLM's own default
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
        """How to take a push of `manifest` if it carries adapters; None if it carries weights."""
        return self.adapters if self.adapters and self.adapters.is_meant_by(manifest) else None


class Sampler(Protocol):
    """An engine that samples responses and takes new weights while it runs."""

    async def start(self) -> None:
        """Load the model. Must be awaited before anything else."""
        ...

    def coming(self) -> AbstractContextManager[None]:
        """A prompt is on its way while the body runs: an engine that is idle need not begin without it."""
        ...

    async def sample(
        self,
        prompt: Prompt,
        media: Sequence[ProcessedMedia],
        settings: SamplingSettings,
        attempt: Attempt,
        emit: Emit,
    ) -> list[SampledSequence]:
        """All siblings of one prompt, each from where an earlier attempt left it; other prompts run beside it.

        `emit` is given the new chunks of the siblings every `chunk_tokens` tokens, and the siblings. The tokens that
        were kept stay as they are, with their log-probs and versions. Where the engine serves older weights than
        `settings.min_version`, the prompt waits for the push that brings those. A sampler that takes prompts one after
        the other takes them in order of arrival, whatever their priority.
        """
        ...

    async def prompt_logprobs(self, prompt: Prompt, media: Sequence[ProcessedMedia]) -> np.ndarray:
        """float32 [P - 1]: log-prob of each prompt token after the first, at temperature 1 without banned ids."""
        ...

    async def probe(self) -> None:
        """Show that the engine works: sample one token of a prompt of one token. One that is busy need not."""
        ...

    async def sleep(self) -> None:
        """Give the device's memory back; nothing may be sampled until both parts are awake. No request is under way."""
        ...

    async def wake_up(self, tag: str) -> None:
        """Take memory again: `weights`, then `kv_cache`. At `sleep_level` 2 weights are dead until the next push."""
        ...

    def load(self, name: str) -> EngineLoad:
        """How loaded the engine is now; `name` is what it is called. Preemptions, and what a core of another process
        has in hand, need `EngineSettings.reports_load`.
        """
        ...

    async def check_manifest(self, manifest: Manifest) -> None:
        """Refuse (ManifestError) a push that does not fit, before anything is sent."""
        ...

    async def join_transfer(self, rendezvous: Rendezvous, rank: int) -> None:
        """Become receiver `rank` of a transfer group, leaving the one before; an engine that is split over several GPUs
        takes the ranks from `rank` on, in the order of its own."""
        ...

    async def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> int:
        """Freeze running requests, take a push from the transfer group, stamp `version`, and go on; returns the version
        that the engine then names.

        No later request sees a cache of the old weights (KV, prefix, encoder). A running one keeps its KV only with
        `EngineSettings.keeps_kv_cache`.
        """
        ...

    async def load_weights(
        self, manifest: Manifest, bucket_bytes: int, buckets: Iterable[np.ndarray], version: int
    ) -> None:
        """The same from packed buckets: for a late joiner, which is in no transfer group yet. Each is taken once, on
        another thread than the caller's: it may have to be fetched."""
        ...

    async def weight_version(self) -> int: ...

    async def close(self) -> None: ...
