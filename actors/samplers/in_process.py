"""Samplers in the process of their actor: progress and cancellation."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from mobula.actors.processors.text.chat_template import decode_response
from mobula.actors.samplers.base import EngineSettings
from mobula.actors.samplers.served import ServedVersion
from mobula.cluster.errors import RolloutError, WeightSyncError
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.media import ProcessedMedia
from mobula.cluster.records.partial_response import NOTHING, Attempt, Emit, SampledSequence, TokenChunk
from mobula.cluster.records.trajectory import FinishReason, Prompt
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.runtime.seeds import derived_seed
from mobula.cluster.runtime.vitals import EngineLoad
from mobula.cluster.weight_sync.changes import Base
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.cluster.weight_sync.transport import Rendezvous, TransferGroup, unpack_all
from mobula.learner.policies.adapters import changed_weights
from mobula.learner.policies.loading import as_stored, checkpoint_names


class StopStrings:
    """Ends a response with the token that completes a stop string, which may begin in an earlier attempt."""

    def __init__(self, model: str, strings: Sequence[str], hidden: Collection[int] = ()) -> None:
        """`model` is the checkpoint of the tokenizer, which is loaded only with `strings`. Ids in `hidden` are removed
        from the text."""
        self._model = model
        self._strings = tuple(strings)
        self._hidden = frozenset(hidden)

    @property
    def are_on(self) -> bool:
        return bool(self._strings)

    def cut(self, sequence: SampledSequence) -> SampledSequence:
        """Returns the response up to the token that completes a stop string; unchanged without a stop string."""
        if not self._strings:
            return sequence
        assert isinstance(sequence.actions, TokenActions), "only tokens have a text"
        ids = sequence.actions.token_ids
        if not self._has_one(ids):
            return sequence
        length = 1 + bisect_left(range(1, len(ids) + 1), True, key=lambda num: self._has_one(ids[:num]))
        return replace(sequence.until(length), finish_reason=FinishReason.STOP_STRING)

    def _has_one(self, ids: np.ndarray) -> bool:
        text = decode_response(_tokenizer(self._model), ids, self._hidden)
        return any(string in text for string in self._strings)


@cache
def _tokenizer(model: str) -> Any:
    return AutoTokenizer.from_pretrained(model, trust_remote_code=False)


@dataclass(frozen=True)
class GroupPart:
    """One request of an attempt: `settings.num_samples` siblings that continue `prompt`; `name` is unique."""

    prompt: Prompt
    settings: SamplingSettings
    siblings: Sequence[int]
    name: str


@dataclass(eq=False)
class GroupProgress:
    """Divides a group into requests, collects the tokens of its siblings, and reports them in chunks. When a sibling
    has `chunk_tokens` unreported tokens, the chunks of all siblings are reported together: one report per chunk, and a
    sibling loses at most `chunk_tokens - 1` tokens with its actor. The finished group is returned, not reported."""

    prompt: Prompt
    settings: SamplingSettings
    attempt: Attempt
    emit: Emit
    _: KW_ONLY
    chunk_tokens: int
    stop_strings: StopStrings

    def __post_init__(self) -> None:
        self.siblings: list[SampledSequence] = list(self.attempt.siblings) or [NOTHING] * self.settings.num_samples
        self.is_cancelled = False
        self._request_id = self.attempt.request_id
        self._reported = list(self.siblings)

    @classmethod
    def of(
        cls, engine: EngineSettings, prompt: Prompt, settings: SamplingSettings, attempt: Attempt, emit: Emit
    ) -> GroupProgress:
        stop_strings = StopStrings(engine.model, settings.stop_strings, engine.hidden_ids)
        return cls(prompt, settings, attempt, emit, chunk_tokens=engine.sampler.chunk_tokens, stop_strings=stop_strings)

    def opening(self) -> GroupPart | None:
        """The request for the first tokens of empty siblings, if those have a temperature of their own (FIRE)."""
        empty = self._empty()
        if not (self._has_opening and empty):
            return None
        temperature = self.settings.first_token_temperature
        own = replace(self.settings, num_samples=len(empty), temperature=temperature, max_tokens=1)
        return GroupPart(self.prompt, own, empty, f"{self._request_id}#first")

    def parts(self) -> list[GroupPart]:
        """The requests after the opening: one for a new group, else one for each unfinished sibling."""
        if not self.attempt.siblings and not self._has_opening:
            return [GroupPart(self.prompt, self.settings, range(len(self.siblings)), self._request_id)]
        if self._has_opening and (empty := self._empty()):
            raise RolloutError(f"the engine ended request {self._request_id} without a first token of siblings {empty}")
        return [self._rest(sibling) for sibling in self.unfinished()]

    def add(self, sibling: int, piece: SampledSequence) -> None:
        """Appends `piece` to `sibling`, without tokens after a stop string."""
        known = self.siblings[sibling]
        is_first = self._has_opening and known.num_tokens == 0
        if is_first and piece.finish_reason is FinishReason.LENGTH and self.settings.max_tokens > 1:
            piece = replace(piece, finish_reason=None)  # the limit of the opening
        if not (known.is_finished and self.stop_strings.are_on):
            self.siblings[sibling] = self.stop_strings.cut(known.followed_by(piece))

    def unfinished(self) -> list[int]:
        return [index for index, sibling in enumerate(self.siblings) if not sibling.is_finished]

    def report(self) -> None:
        """Emits the new chunks of all siblings if a sibling has a full chunk."""
        if not self.unfinished():
            return
        if any(now.num_tokens - reported.num_tokens >= self.chunk_tokens for now, reported in self._pairs()):
            chunks = list(self._new_chunks())
            self._reported = list(self.siblings)
            self.emit(chunks, tuple(self.siblings))

    def finished(self) -> list[SampledSequence]:
        if unfinished := self.unfinished():
            raise RolloutError(f"the engine ended request {self._request_id} without an end of siblings {unfinished}")
        return self.siblings

    @property
    def _has_opening(self) -> bool:
        return self.settings.first_token_temperature > 0

    def _empty(self) -> list[int]:
        return [index for index, sibling in enumerate(self.siblings) if sibling.num_tokens == 0]

    def _rest(self, sibling: int) -> GroupPart:
        """The request that samples a sibling from its last token on."""
        # An engine cannot resume a random generator, so the rest is a new draw from the same distribution. The seed
        # depends on the position: the original seed would repeat the random numbers of the first tokens. Greedy
        # decoding continues exactly.
        so_far, settings = self.siblings[sibling], self.settings
        assert isinstance(so_far.actions, TokenActions)
        ids = np.concatenate([self.prompt.expanded_ids, so_far.actions.token_ids])  # positions of media are unchanged
        seed = derived_seed(settings.seed, f"{sibling}/{so_far.num_tokens}")
        rest = replace(settings, num_samples=1, max_tokens=settings.max_tokens - so_far.num_tokens, seed=seed)
        return GroupPart(replace(self.prompt, expanded_ids=ids), rest, [sibling], f"{self._request_id}#{sibling}")

    def _pairs(self) -> Iterator[tuple[SampledSequence, SampledSequence]]:
        """Yields (current, last reported) of each sibling."""
        return zip(self.siblings, self._reported, strict=True)

    def _new_chunks(self) -> Iterator[TokenChunk]:
        for index, (sibling, reported) in enumerate(self._pairs()):
            if sibling is not reported:
                yield TokenChunk(self._request_id, index, reported.num_tokens, sibling.since(reported.num_tokens))


class InProcessSampler(ABC):
    """Base of samplers that run one group at a time; a push waits for the running group."""

    _model: torch.nn.Module  # set by `start`, which then calls `_take_parameters`

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._device = torch.device(settings.device)
        self._turn = asyncio.Lock()
        self._num_asked = 0  # groups that run or wait
        self._num_tokens = 0  # sampled so far
        self._is_asleep = False
        self._served = ServedVersion()
        self._group: TransferGroup | None = None
        self._base = Base()  # the parameters, and the version of all of them

    def coming(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def prompt_logprobs(self, prompt: Prompt, media: Sequence[ProcessedMedia]) -> np.ndarray:
        async with self._turn:
            return await asyncio.to_thread(self._prompt_logprobs, prompt, media)

    async def probe(self) -> None:
        if not self._is_asleep and not self._turn.locked():
            async with self._turn:
                await asyncio.to_thread(self._work_a_little)

    async def sleep(self) -> None:
        async with self._turn:
            self._is_asleep = True
            self._base.tensors = {}  # they hold the memory on the device
            for module in self._placed():
                module.to("cpu")
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    async def wake_up(self, tag: str) -> None:
        if tag == "weights":
            async with self._turn:
                for module in self._placed():
                    module.to(self._device)
                self._take_parameters()
                self._is_asleep = False

    def load(self) -> EngineLoad:
        num_running = min(self._num_asked, 1)
        waiting = self._num_asked - num_running
        return EngineLoad(0.0, num_running, waiting, num_preemptions=0, num_tokens=self._num_tokens)

    async def check_manifest(self, manifest: Manifest) -> None:
        manifest.check_against(self._settings.expected_by(manifest))

    async def join_transfer(self, rendezvous: Rendezvous, rank: int) -> None:
        if self._group is not None:
            self._group.close()
        self._group = await asyncio.to_thread(TransferGroup, rendezvous, rank, self._device)

    async def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> int:
        async with self._turn:
            await asyncio.to_thread(self._receive, manifest, bucket_bytes, version)
            self._served.set(version)
        return self._served.number

    async def load_weights(
        self, manifest: Manifest, bucket_bytes: int, buckets: Iterable[np.ndarray], version: int
    ) -> None:
        tensors = unpack_all(manifest, bucket_bytes, buckets)
        async with self._turn:
            await asyncio.to_thread(self._copy_weights, self._weights(manifest, tensors), version)
            self._served.set(version)

    async def weight_version(self) -> int:
        return self._served.number

    async def close(self) -> None:
        if self._group is not None:
            self._group.close()

    @asynccontextmanager
    async def _serving(self, min_version: int) -> AsyncIterator[None]:
        """Waits for weights of `min_version` or newer, then holds the engine for one group."""
        self._num_asked += 1
        try:
            await self._served.reach(min_version)
            async with self._turn:
                yield
        finally:
            self._num_asked -= 1

    def _placed(self) -> tuple[torch.nn.Module, ...]:
        """Returns the modules in device memory while the sampler is awake."""
        return (self._model,)

    def _receive(self, manifest: Manifest, bucket_bytes: int, version: int) -> None:
        if self._group is None:
            raise WeightSyncError("this sampler is in no transfer group: call join_transfer first")
        if manifest.payload == "delta":
            self._group.receive_changes(manifest, bucket_bytes, self._base, version)
            return
        tensors = self._group.receive(manifest, bucket_bytes, keeps=False, into=self._base.tensors)
        self._copy_weights(self._weights(manifest, tensors), version)

    def _weights(
        self, manifest: Manifest, tensors: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Returns the weights that a push changes."""
        adapters = self._settings.adapters_of(manifest)
        return tensors if adapters is None else changed_weights(tensors, adapters.base)

    @torch.no_grad()
    def _copy_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        with self._base.changing_to(version):
            for name, tensor in tensors:
                self._base.tensors[name].copy_(tensor)

    def _take_parameters(self) -> None:
        """Maps the names in a push to the weights of `_model` in their current memory."""
        names, state = checkpoint_names(self._model), self._model.state_dict()
        self._base.tensors = {
            names[name]: as_stored(self._model, names[name], tensor) for name, tensor in state.items() if name in names
        }

    @abstractmethod
    def _prompt_logprobs(self, prompt: Prompt, media: Sequence[ProcessedMedia]) -> np.ndarray:
        """Computes `prompt_logprobs` on a thread."""

    @abstractmethod
    def _work_a_little(self) -> None:
        """Runs one forward pass on a thread."""
