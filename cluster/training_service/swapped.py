"""SwappedEngines: engines that hold one set of whole weights at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from mobula.cluster.errors import DeadlineError, EngineDiedError, WorkerDiedError
from mobula.cluster.rollout.rollout_pool import Engine, RolloutPool
from mobula.cluster.training_service.interfaces import SampleCall, SampleResult
from mobula.cluster.weight_sync.manifest import Manifest


@dataclass(frozen=True)
class PackedWeights:
    """Weights as `Receiver.load_weights` takes them; `buckets` are references into the object store."""

    manifest: Manifest
    bucket_bytes: int
    buckets: Sequence[Any]


class Sampling(Protocol):
    """Samples from the weights that the engines hold."""

    async def sample(self, call: SampleCall) -> SampleResult: ...


class SwappedEngines:
    """Implements `mobula.cluster.training_service.interfaces.AdapterEngines` for whole weights in checkpoint folders.

    Calls of the weights that the engines hold run together. A call of other weights waits for the running ones, then
    all engines load its weights, as late joiners do in a run. Calls begin in the order of their arrival.
    """

    def __init__(self, engines: Sampling, pool: RolloutPool, read: Callable[[Path], PackedWeights], base: Path) -> None:
        """`read` packs the weights of a folder; engines start with those of `base`."""
        self._engines = engines
        self._pool = pool
        self._read = read
        self._folders: dict[str | None, Path] = {None: base}
        self._held: Path | None = base  # folder of the weights that the engines hold; None while they change
        self._packed: PackedWeights | None = None  # those weights, for engines that join; None: as engines start
        self._version = 0
        self._num_running = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._turn = asyncio.Lock()
        self._changing = asyncio.Lock()  # held while engines load weights
        pool.admit_with(self._admit)

    async def serve(self, adapter: str, folder: Path) -> None:
        """Makes weights available.

        Raises:
            ValueError: weights have this name.
        """
        if adapter in self._folders:
            raise ValueError(f"weights {adapter!r} exist: served weights never change, so give new ones another name")
        self._folders[adapter] = folder

    async def withdraw(self, adapter: str) -> None:
        """Raises: ValueError: it is not served."""
        self._folder_of(adapter)
        del self._folders[adapter]

    async def sample(self, call: SampleCall) -> SampleResult:
        """Loads the weights of the call into the engines if they hold others, and samples.

        Raises:
            ValueError: the prompt does not fit the model, or the weights are not served or do not fit.
            RolloutError, DeadlineError: as of `PooledAdapterEngines.sample`.
        """
        async with self._holding(call.adapter):
            return await self._engines.sample(replace(call, adapter=None))

    @asynccontextmanager
    async def _holding(self, name: str | None) -> AsyncIterator[None]:
        """The engines hold these weights while the body runs."""
        async with self._turn:
            folder = self._folder_of(name)
            if folder != self._held:
                await self._is_idle.wait()
                await self._swap(folder)
            self._num_running += 1
            self._is_idle.clear()
        try:
            yield
        finally:
            self._num_running -= 1
            if self._num_running == 0:
                self._is_idle.set()

    async def _swap(self, folder: Path) -> None:
        """Loads weights into all engines. Engines that join meanwhile wait for the end, and load them then."""
        packed = await asyncio.to_thread(self._read, folder)
        async with self._changing:
            self._version += 1
            self._held, self._packed = None, packed
            self._pool.announced(self._version)
            loaded: set[Engine] = set()
            while missing := [engine for engine in self._pool.receivers() if engine not in loaded]:
                loaded.update(missing)
                await asyncio.gather(*(self._load(engine, packed) for engine in missing))
            self._pool.published(self._version)
            self._held = folder

    async def _load(self, engine: Engine, packed: PackedWeights) -> None:
        """Loads weights into one engine, which is lost if it fails."""
        try:
            await engine.load_weights(packed.manifest, packed.bucket_bytes, packed.buckets, self._version)
            self._pool.synced(engine, self._version)
        except (WorkerDiedError, EngineDiedError, DeadlineError) as error:
            self._pool.lose(engine, error)

    async def _admit(self, engine: Engine) -> int:
        async with self._changing:
            if self._packed is not None:
                packed = self._packed
                await engine.load_weights(packed.manifest, packed.bucket_bytes, packed.buckets, self._version)
            return await engine.weight_version()

    def _folder_of(self, name: str | None) -> Path:
        if name not in self._folders:
            names = ", ".join(sorted(str(known) for known in self._folders if known is not None)) or "none"
            raise ValueError(f"weights {name!r} are not served (served: {names}): serve them first")
        return self._folders[name]
