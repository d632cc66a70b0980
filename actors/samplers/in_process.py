"""InProcessSampler: a torch model in this process, whose weights are replaced in place."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext

import numpy as np
import torch

from mobula.actors.samplers.base import EngineSettings
from mobula.actors.samplers.serving import ServedVersion
from mobula.cluster.errors import WeightSyncError
from mobula.cluster.records.media import ProcessedMedia
from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.runtime.vitals import EngineLoad
from mobula.cluster.weight_sync.changes import Base
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.cluster.weight_sync.transport import Rendezvous, TransferGroup, unpack_all
from mobula.learner.policies.loading import as_stored, checkpoint_names
from mobula.learner.policies.lora import changed_weights


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
