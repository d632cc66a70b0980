"""RolloutActor: one prompt to one TrajectoryGroup, sampled at known weight versions."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from mobula.actors.processors.text.special_tokens import decode_response
from mobula.actors.rollout.server import PromptServer
from mobula.actors.samplers import build_sampler
from mobula.actors.samplers.base import EngineSettings
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.media import MediaHandle, MediaReader, ProcessedMedia
from mobula.cluster.records.partial_response import Attempt, SampledSequence, TokenChunk
from mobula.cluster.records.trajectory import FinishReason, GroupReport, Prompt, Response, Trajectory, TrajectoryGroup
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.runtime.object_store import fetch
from mobula.cluster.runtime.vitals import EngineLoad
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.cluster.weight_sync.transport import Rendezvous


class MediaBatcher:
    """Reads media beside an event loop.

    A way to a thread and back, and a question to the object store, cost more than what they bring for one prompt. So
    while one read is under way, the prompts that come wait for the next, which is for all of them. What is not on this
    node yet is waited for by its own prompt alone.
    """

    def __init__(self, reader: MediaReader) -> None:
        self._reader = reader
        self._waiting: list[tuple[Sequence[MediaHandle], asyncio.Future[list[ProcessedMedia] | None]]] = []
        self._reading: asyncio.Task[None] | None = None

    async def read(self, handles: Sequence[MediaHandle]) -> list[ProcessedMedia]:
        """The media of `handles`, in order; raises as `MediaReader.read` does."""
        if not handles:
            return []
        at_hand = asyncio.get_running_loop().create_future()
        self._waiting.append((handles, at_hand))
        if self._reading is None:
            self._reading = asyncio.create_task(self._read_waiting(), name="read media")
        media = await at_hand
        return media if media is not None else await asyncio.to_thread(self._reader.read, handles)

    async def _read_waiting(self) -> None:
        """Serve until no call waits. A call that is not served reads for itself and gets its own error."""
        try:
            while self._waiting:
                waiting, self._waiting = self._waiting, []
                found = await self._found([handles for handles, _ in waiting])
                for (_, at_hand), media in zip(waiting, found, strict=True):
                    if not at_hand.done():
                        at_hand.set_result(media)
        finally:
            self._reading = None

    async def _found(self, wanted: list[Sequence[MediaHandle]]) -> list[list[ProcessedMedia] | None]:
        try:
            return await asyncio.to_thread(self._reader.read_at_hand, wanted)
        except Exception:  # of which of them is not known here: it comes again where one reads for itself
            return [None] * len(wanted)


MEDIA_IN_MEMORY = 512  # processed images that one actor keeps at hand; each is also in the object store


class RolloutActor(PromptServer):
    """Samples groups with an engine of its own, and takes new weights between or within them.

    Runs as an asyncio actor: many prompts are in flight at a time and the engine batches them.
    """

    def __init__(self, sampler: str, settings: EngineSettings, *, object_timeout_s: float) -> None:
        super().__init__()
        self._sampler = build_sampler(sampler, settings)
        self._tokenizer = None if settings.denoising else AutoTokenizer.from_pretrained(settings.model)
        self._hidden_ids = settings.hidden_ids
        self._object_timeout_s = object_timeout_s
        self._media = MediaBatcher(MediaReader(timeout_s=object_timeout_s, max_items=MEDIA_IN_MEMORY))

    async def start(self) -> None:
        """Load the engine."""
        await self._sampler.start()

    async def ping(self) -> int:
        """The weight version it serves; answers while it generates."""
        return await self._sampler.weight_version()

    async def probe(self) -> None:
        """Sample one token: a worker that can do that is healthy."""
        await self._sampler.probe()

    async def sleep(self) -> None:
        """Give the device's memory back."""
        await self._sampler.sleep()

    async def wake_up(self, tag: str) -> None:
        """Take the memory of `weights` or of the `kv_cache` again."""
        await self._sampler.wake_up(tag)

    def engine_load(self) -> EngineLoad:
        """How loaded its engine is, for its sign of life."""
        return self._sampler.load("engine")

    async def load(self, name: str) -> EngineLoad:
        """How loaded its engine is; `name` is this actor's."""
        return self._sampler.load(name)

    async def generate(
        self, prompt: Prompt, settings: SamplingSettings, attempt: Attempt
    ) -> tuple[TrajectoryGroup, GroupReport]:
        """Sample all siblings of one prompt, from where an earlier attempt left them.

        Two results, so that the bytes can stay where they were made: the group, and its report for the driver.
        """
        with self._sampler.coming():
            media = await self._media.read(prompt.media)
        sequences = await self._sampler.sample(prompt, media, settings, attempt, self._report)
        group = TrajectoryGroup(prompt, tuple(self._trajectory(prompt, i, s) for i, s in enumerate(sequences)))
        return group, (group.summary(), group.small_responses())

    async def sample_apart(self, prompt: Prompt, settings: SamplingSettings) -> TrajectoryGroup:
        """Sample a prompt that is no part of the run's, without an environment; nothing of it is reported."""
        media = await self._media.read(prompt.media)
        attempt = Attempt(uuid.uuid4().hex, ())
        sequences = await self._sampler.sample(prompt, media, settings, attempt, lambda *_: None)
        return TrajectoryGroup(prompt, tuple(self._trajectory(prompt, i, s) for i, s in enumerate(sequences)))

    async def prompt_logprobs(self, prompt: Prompt) -> np.ndarray:
        """float32 [P - 1]: log-probs of the prompt's own tokens, for the weight-sync canary."""
        return await self._sampler.prompt_logprobs(prompt, await self._media.read(prompt.media))

    async def check_manifest(self, manifest: Manifest) -> None:
        await self._sampler.check_manifest(manifest)

    async def join_transfer(self, rendezvous: Rendezvous, rank: int) -> None:
        await self._sampler.join_transfer(rendezvous, rank)

    async def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> int:
        """Returns the version that the engine then names."""
        return await self._sampler.receive_weights(manifest, bucket_bytes, version)

    async def load_weights(self, manifest: Manifest, bucket_bytes: int, buckets: Sequence[Any], version: int) -> None:
        """`buckets` are arrays or references to them, which are fetched one after the other."""

        def fetched() -> Iterator[np.ndarray]:
            for n, bucket in enumerate(buckets):
                yield from fetch([bucket], timeout_s=self._object_timeout_s, what=f"bucket {n} of version {version}")

        await self._sampler.load_weights(manifest, bucket_bytes, fetched(), version)

    async def close(self) -> None:
        await self._sampler.close()

    def _report(self, chunks: Sequence[TokenChunk], siblings: Sequence[SampledSequence]) -> None:
        """Responses that have ended travel as text as well: they can be scored before their group is there."""
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
