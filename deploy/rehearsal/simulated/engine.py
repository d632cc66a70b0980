"""SimulatedEngine: an engine of the rollout pool whose responses have lengths and no content."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mobula.cluster.errors import WorkerDiedError
from mobula.cluster.records.trajectory import Generated, GroupSummary, Prompt
from mobula.cluster.roles import PromptScores, SamplingSettings
from mobula.cluster.runtime.vitals import Vitals
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.cluster.weight_sync.transport import Rendezvous
from mobula.deploy.rehearsal.simulated.decoder import Decoder
from mobula.deploy.rehearsal.simulated.lengths import ResponseLengths
from mobula.deploy.rehearsal.simulated.observed import Observed

TOKEN_BYTES = 9  # of a sampled token in the object store: id, log-prob and mask
PROMPT_TOKEN_BYTES = 8  # of a prompt's token, in both of its sequences


@dataclass(frozen=True)
class SimulatedGroup:
    """Stands for the reference to a group: its prompt, and the node that holds its bytes."""

    prompt: Prompt
    node_id: str
    num_siblings: int


@dataclass(frozen=True)
class EngineTimes:
    """Seconds of an engine's calls that do not decode."""

    start_s: float  # loading the model
    receive_s: float  # of the weights of one push, which wait for the learner; the engine does not decode meanwhile
    load_s: float  # of received weights, with the processor
    wait_s: float = 0.0  # from the last token of a group to its arrival in the driver
    wake_s: float = 0.0  # of weights or KV cache, where the engine shares its GPUs with the learner


class SimulatedEngine:
    """Implements `mobula.cluster.rollout.rollout_pool.Engine` with a `Decoder`."""

    def __init__(
        self,
        name: str,
        node_id: str,
        decoder: Decoder,
        lengths: ResponseLengths,
        times: EngineTimes,
        observed: Observed,
    ) -> None:
        self.name = name
        self.node_id = node_id
        self.decoder = decoder
        self._lengths = lengths
        self._times = times
        self._observed = observed
        observed.add(decoder)
        self._version = 0
        self._arrived = asyncio.Event()  # set, and replaced, with each version
        self._death: Exception | None = None

    async def start(self) -> None:
        await asyncio.sleep(self._times.start_s)
        self._check_alive()
        self.decoder.resume(self._version)

    async def generate(self, prompt: Prompt, settings: SamplingSettings) -> Generated:
        """Samples a group; first waits for the push of `settings.min_version`.

        Raises:
            WorkerDiedError: the engine was lost.
        """
        while self._version < settings.min_version:
            self._check_alive()
            await self._arrived.wait()
        self._check_alive()
        with self._observed.cpu:
            lengths = self._lengths.of(prompt.prompt_id, settings.num_samples).tolist()
            decoding = self.decoder.decode(lengths, prompt.num_tokens)
        tokens = await decoding
        if self._times.wait_s:
            await asyncio.sleep(self._times.wait_s)
        with self._observed.cpu:
            summary = summary_of(prompt, tokens, lengths, settings.max_tokens)
            group = SimulatedGroup(prompt, self.node_id, summary.num_trajectories)
            self._observed.store.hold(group, self.node_id, summary.num_bytes)
            for handle in prompt.media:
                self._observed.store.hold(handle, self._observed.driver_node, handle.num_bytes)
        return Generated(group, summary)

    def begin_sample(self, prompt: Prompt, settings: SamplingSettings) -> Future[Any]:
        return Future()

    async def score_prompt(self, prompt: Prompt, adapter: str | None, num_top: int) -> PromptScores:
        raise ValueError("a rehearsed engine computes no log-probs of prompts")

    async def serve(self, adapter: str, folder: Path) -> None:
        raise ValueError("a rehearsed engine serves no adapters")

    async def withdraw(self, adapter: str) -> None:
        raise ValueError("a rehearsed engine serves no adapters")

    async def is_alive(self) -> Vitals | None:
        self._check_alive()
        return None

    async def probe(self) -> None:
        self._check_alive()

    async def close(self) -> None:
        self.lose(WorkerDiedError(f"{self.name} is ended"))

    def lose(self, error: Exception) -> None:
        """Ends the process: every call fails with `error` from now on."""
        if self._death is None:
            self._death = error
            self.decoder.fail(error)
            self._arrived.set()

    async def sleep(self) -> None:
        self._check_alive()
        self.decoder.pause()

    async def wake_up(self, tag: str) -> None:
        await asyncio.sleep(self._times.wake_s)
        self._check_alive()
        if tag == "kv_cache":
            self.decoder.resume(self._version)

    async def check_manifest(self, manifest: Manifest) -> None:
        self._check_alive()

    async def join_transfer(self, rendezvous: Rendezvous, rank: int) -> None:
        self._check_alive()

    async def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> int:
        self.decoder.pause()
        await self._receive(version)
        return version

    async def load_weights(self, manifest: Manifest, bucket_bytes: int, buckets: Sequence[Any], version: int) -> None:
        self.decoder.pause()
        await self._receive(version)

    async def weight_version(self) -> int:
        self._check_alive()
        return self._version

    async def prompt_logprobs(self, prompt: Prompt) -> np.ndarray:
        """Returns float32 [P - 1]: 0, as simulated learner ranks do."""
        self._check_alive()
        return np.zeros(max(0, prompt.num_tokens - 1), dtype=np.float32)

    async def _receive(self, version: int) -> None:
        await asyncio.sleep(self._times.receive_s)
        await self.decoder.cores.compute(self._times.load_s)
        self._serve(version)

    def _serve(self, version: int) -> None:
        self._check_alive()
        self._version = version
        self.decoder.resume(version)
        self._arrived.set()
        self._arrived = asyncio.Event()

    def _check_alive(self) -> None:
        if self._death is not None:
            raise self._death


def summary_of(
    prompt: Prompt, tokens_by_version: Mapping[int, int], lengths: Sequence[int], max_tokens: int
) -> GroupSummary:
    """The summary of a group that has lengths and nothing else."""
    num_tokens = sum(lengths)
    return GroupSummary(
        group_id=prompt.prompt_id,
        sample_id=prompt.sample_id,
        num_trajectories=len(lengths),
        num_steps=tuple(lengths),
        num_prompt_tokens=prompt.num_tokens,
        num_media_tokens=sum(span.end - span.start for span in prompt.media_spans),
        num_tokens=num_tokens,
        num_truncated=Counter(length >= max_tokens for length in lengths)[True],
        tokens_by_version=dict(tokens_by_version),
        media_keys=tuple(handle.key for handle in prompt.media),
        num_media_bytes=sum(handle.num_bytes for handle in prompt.media),
        num_bytes=TOKEN_BYTES * num_tokens + PROMPT_TOKEN_BYTES * prompt.num_tokens,
    )
