"""RolloutActor: samples one TrajectoryGroup per prompt, at known weight versions."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from transformers import AutoTokenizer

from mobula.actors.processors.text.chat_template import decode_response
from mobula.actors.rollout.server import PromptServer
from mobula.actors.samplers import build_sampler
from mobula.actors.samplers.base import AdapterSampler, EngineSettings
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.media import MediaHandle, MediaReader, ProcessedMedia
from mobula.cluster.records.partial_response import Attempt, SampledSequence, TokenChunk
from mobula.cluster.records.trajectory import FinishReason, GroupReport, Prompt, Response, Trajectory, TrajectoryGroup
from mobula.cluster.roles import PromptScores, SamplingSettings
from mobula.cluster.runtime.object_store import fetch
from mobula.cluster.runtime.vitals import EngineLoad
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.cluster.weight_sync.transport import Rendezvous


class MediaBatcher:
    """Reads media on a thread for an event loop, in batches. The switch to a thread and the request to the object store
    cost more than reading the media of one prompt, so prompts that arrive during a read share the next read. A prompt
    with media on another node waits alone."""

    def __init__(self, reader: MediaReader) -> None:
        self._reader = reader
        self._waiting: list[tuple[Sequence[MediaHandle], asyncio.Future[list[ProcessedMedia] | None]]] = []
        self._reading: asyncio.Task[None] | None = None

    async def read(self, handles: Sequence[MediaHandle]) -> list[ProcessedMedia]:
        """Returns the media of `handles`, in order; raises the errors of `MediaReader.read`."""
        if not handles:
            return []
        local = asyncio.get_running_loop().create_future()
        self._waiting.append((handles, local))
        if self._reading is None:
            self._reading = asyncio.create_task(self._read_waiting(), name="read media")
        media = await local
        return media if media is not None else await asyncio.to_thread(self._reader.read, handles)

    async def _read_waiting(self) -> None:
        """Reads until no call waits. A call that gets None reads alone, and raises its own error."""
        try:
            while self._waiting:
                waiting, self._waiting = self._waiting, []
                batch: list[list[ProcessedMedia] | None]
                try:
                    handles = [handles for handles, _ in waiting]
                    batch = await asyncio.to_thread(self._reader.read_at_hand, handles)
                except Exception:  # the failing call is unknown: each call reads alone
                    batch = [None] * len(waiting)
                for (_, local), media in zip(waiting, batch, strict=True):
                    if not local.done():
                        local.set_result(media)
        finally:
            self._reading = None


MEDIA_IN_MEMORY = 512  # cached processed images of one actor; each is also in the object store


class RolloutActor(PromptServer):
    """Samples groups with one engine, many at a time, and receives weights between or during them."""

    def __init__(self, sampler: str, settings: EngineSettings, *, object_timeout_s: float) -> None:
        super().__init__()
        self._sampler = build_sampler(sampler, settings)
        self._tokenizer = (
            None if settings.denoising else AutoTokenizer.from_pretrained(settings.model, trust_remote_code=False)
        )
        self._hidden_ids = settings.hidden_ids
        self._object_timeout_s = object_timeout_s
        self._media = MediaBatcher(MediaReader(timeout_s=object_timeout_s, max_items=MEDIA_IN_MEMORY))

    async def start(self) -> None:
        await self._sampler.start()

    async def ping(self) -> int:
        """Returns the served weight version, also during generation."""
        return await self._sampler.weight_version()

    async def probe(self) -> None:
        await self._sampler.probe()

    async def sleep(self) -> None:
        await self._sampler.sleep()

    async def wake_up(self, tag: str) -> None:
        await self._sampler.wake_up(tag)

    def engine_load(self) -> EngineLoad:
        return self._sampler.load()

    async def generate(
        self, prompt: Prompt, settings: SamplingSettings, attempt: Attempt
    ) -> tuple[TrajectoryGroup, GroupReport]:
        """Samples all siblings of one prompt, continuing an earlier attempt; the group stays on this node."""
        with self._sampler.coming():
            media = await self._media.read(prompt.media)
        sequences = await self._sampler.sample(prompt, media, settings, attempt, self._report)
        group = TrajectoryGroup(prompt, tuple(self._trajectory(prompt, i, s) for i, s in enumerate(sequences)))
        return group, (group.summary(), group.small_responses())

    async def sample_apart(self, prompt: Prompt, settings: SamplingSettings) -> TrajectoryGroup:
        """Samples a prompt outside the run, without environment and without reports."""
        media = await self._media.read(prompt.media)
        sequences = await self._sampler.sample(prompt, media, settings, Attempt(uuid.uuid4().hex, ()), lambda *_: None)
        return TrajectoryGroup(prompt, tuple(self._trajectory(prompt, i, s) for i, s in enumerate(sequences)))

    async def prompt_logprobs(self, prompt: Prompt) -> np.ndarray:
        """Returns float32 [P - 1], the log-probs of the prompt's tokens, for the weight-sync canary."""
        return await self._sampler.prompt_logprobs(prompt, await self._media.read(prompt.media))

    async def serve(self, adapter: str, folder: Path) -> None:
        await self._adapter_sampler.serve(adapter, folder)

    async def withdraw(self, adapter: str) -> None:
        await self._adapter_sampler.withdraw(adapter)

    async def score_prompt(self, prompt: Prompt, adapter: str | None, num_top: int) -> PromptScores:
        media = await self._media.read(prompt.media)
        return await self._adapter_sampler.score_prompt(prompt, media, adapter=adapter, num_top=num_top)

    @property
    def _adapter_sampler(self) -> AdapterSampler:
        return cast(AdapterSampler, self._sampler)  # the configuration allows `sampler.adapters` with these alone

    async def check_manifest(self, manifest: Manifest) -> None:
        await self._sampler.check_manifest(manifest)

    async def join_transfer(self, rendezvous: Rendezvous, rank: int) -> None:
        await self._sampler.join_transfer(rendezvous, rank)

    async def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> int:
        return await self._sampler.receive_weights(manifest, bucket_bytes, version)

    async def load_weights(self, manifest: Manifest, bucket_bytes: int, buckets: Sequence[Any], version: int) -> None:
        """Loads `buckets`, arrays or references to arrays, which are fetched one by one."""

        def fetched() -> Iterator[np.ndarray]:
            for n, bucket in enumerate(buckets):
                yield from fetch([bucket], timeout_s=self._object_timeout_s, what=f"bucket {n} of version {version}")

        await self._sampler.load_weights(manifest, bucket_bytes, fetched(), version)

    async def close(self) -> None:
        await self._sampler.close()

    def _report(self, chunks: Sequence[TokenChunk], siblings: Sequence[SampledSequence]) -> None:
        """Reports chunks. An ended response includes its text, so that it is scored before the group is complete."""
        ended = {chunk.sibling: self._response(siblings[chunk.sibling]) for chunk in chunks if chunk.tokens.is_finished}
        self.report([replace(c, response=ended[c.sibling]) if c.sibling in ended else c for c in chunks])

    def _response(self, sequence: SampledSequence) -> Response:
        is_truncated, text = sequence.finish_reason is FinishReason.LENGTH, ""
        if self._tokenizer is not None and isinstance(sequence.actions, TokenActions) and not sequence.images:
            text = decode_response(self._tokenizer, sequence.actions.token_ids, self._hidden_ids)
        return Response(text, sequence.num_tokens, is_truncated, sequence.images)

    def _trajectory(self, prompt: Prompt, index: int, sequence: SampledSequence) -> Trajectory:
        assert sequence.finish_reason is not None
        return Trajectory(
            trajectory_id=f"{prompt.prompt_id}#{index}",
            actions=sequence.actions,
            behavior_logprobs=sequence.logprobs,
            action_mask=np.ones(sequence.num_tokens, dtype=bool),
            weight_spans=sequence.weight_spans,
            finish_reason=sequence.finish_reason,
            response=self._response(sequence),
        )
