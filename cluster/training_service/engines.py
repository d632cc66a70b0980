"""Engines of the training service: adapters in slots, whole checkpoints in turns."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mobula.cluster.errors import DeadlineError, EngineDiedError, LostObjectError, RolloutError, WorkerDiedError
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.trajectory import FinishReason, Prompt, Trajectory
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.rollout.dispatcher import RetryingRollouts
from mobula.cluster.rollout.rollout_pool import Engine, RolloutPool
from mobula.cluster.runtime.object_store import fetch
from mobula.cluster.training_service.interfaces import SampleCall, SampleResult, ScoredTokens
from mobula.cluster.weight_sync.manifest import Manifest

_logger = logging.getLogger(__name__)


class Slots:
    """At most `num_slots` units of work in flight. A call of more units takes all slots."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._num_free = num_slots
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def held(self, num_units: int) -> AsyncIterator[None]:
        """Holds slots while the body runs. Waits without a deadline: each earlier call has one."""
        num = min(num_units, self._num_slots)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num, granted))
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._give_back(num)
            else:
                self._waiting.remove((num, granted))
                self._grant()
            raise
        try:
            yield
        finally:
            self._give_back(num)

    def _give_back(self, num: int) -> None:
        self._num_free += num
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._num_free:
            num, granted = self._waiting.popleft()
            self._num_free -= num
            granted.set_result(None)


@dataclass(frozen=True)
class PackedWeights:
    """Weights as `Receiver.load_weights` takes them; `buckets` are references into the object store."""

    manifest: Manifest
    bucket_bytes: int
    buckets: Sequence[Any]


class SwappedEngines:
    """Implements `mobula.cluster.training_service.interfaces.AdapterEngines` for whole weights in checkpoint folders.

    Calls of the weights that the engines hold run together. A call of other weights waits for the running ones, then
    all engines load its weights, as late joiners do in a run. Calls begin in the order of their arrival.
    """

    def __init__(
        self, engines: PooledAdapterEngines, pool: RolloutPool, read: Callable[[Path], PackedWeights], base: Path
    ) -> None:
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
        if adapter in self._folders:
            raise ValueError(f"weights {adapter!r} exist: served weights never change, so give new ones another name")
        self._folders[adapter] = folder

    async def withdraw(self, adapter: str) -> None:
        """Raises: ValueError: it is not served."""
        self._folder_of(adapter)
        del self._folders[adapter]

    async def sample(self, call: SampleCall) -> SampleResult:
        """Loads the weights of the call into the engines if they hold others, and samples."""
        async with self._holding(call.adapter):
            return await self._engines.sample(replace(call, adapter=None))

    @asynccontextmanager
    async def _holding(self, name: str | None) -> AsyncIterator[None]:
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


LOADING_TRIES = 2  # times that every engine may be lost while it loads an adapter


@dataclass(frozen=True)
class SampleLimits:
    """Limits of a call, checked before it goes to an engine."""

    max_model_len: int  # tokens of a prompt and a response together
    num_token_ids: int  # of the model's vocabulary
    max_in_flight: int  # on all engines together: sequences, or calls
    counts_sequences: bool  # else calls, for engines that run groups one by one
    object_s: float  # timeout of fetching samples from the object store


class PooledAdapterEngines:
    """Implements `mobula.cluster.training_service.interfaces.AdapterEngines` with the engines of a rollout pool.

    Engines that start later get every served adapter before their first call. A call on a lost engine is run again on
    another from its first token, so that its seed gives the same tokens.
    """

    def __init__(self, pool: RolloutPool, retries: RetryingRollouts, limits: SampleLimits) -> None:
        """`retries` retries calls of `pool`."""
        self._pool = pool
        self._retries = retries
        self._limits = limits
        self._slots = Slots(limits.max_in_flight)
        self._folders: dict[str, Path] = {}  # of the served adapters, by name
        self._loading: set[str] = set()  # names of adapters that are not served yet
        self._numbers = itertools.count()
        pool.admit_with(self._admit)

    async def serve(self, adapter: str, folder: Path) -> None:
        """Loads an adapter on all engines. The folder must exist until the adapter is withdrawn."""
        if adapter in self._folders or adapter in self._loading:
            raise ValueError(f"adapter {adapter!r} exists: served weights never change, so give new ones another name")
        self._loading.add(adapter)
        loaded: set[Engine] = set()
        try:
            await self._load_on_all(adapter, folder, loaded)
        except BaseException:
            await asyncio.gather(*(self._unload(engine, adapter) for engine in loaded))
            raise
        finally:
            self._loading.remove(adapter)

    async def withdraw(self, adapter: str) -> None:
        """Unloads an adapter on all engines, after its running calls."""
        self._check_served(adapter)
        del self._folders[adapter]
        await asyncio.gather(*(self._unload(engine, adapter) for engine in self._pool.receivers()))

    async def sample(self, call: SampleCall) -> SampleResult:
        """Scores the prompt if the call asks for it, then samples it; waits for a slot first. The prompt is scored
        first, because samples then find its KV in the prefix cache, and scoring cannot use it."""
        if call.adapter is not None:
            self._check_served(call.adapter)
        prompt, settings = self._checked(call)
        async with self._slots.held(settings.num_samples if self._limits.counts_sequences else 1):
            scores = None
            if call.has_prompt_logprobs or call.num_top_prompt_tokens:
                num_top = call.num_top_prompt_tokens
                scores = await self._retries.retried(
                    prompt, lambda: self._pool.score_prompt(prompt, call.adapter, num_top)
                )
            trajectories = await self._retries.retried(prompt, lambda: self._sampled(prompt, settings))
        samples = tuple(map(_scored, trajectories)) * (call.settings.num_samples // settings.num_samples)
        if scores is None:
            return SampleResult(samples)
        logprobs = np.concatenate([np.array([np.nan], dtype=np.float32), scores.logprobs])  # [P]
        top = [(), *scores.top] if call.num_top_prompt_tokens else None
        return SampleResult(samples, logprobs if call.has_prompt_logprobs else None, top)

    async def _sampled(self, prompt: Prompt, settings: SamplingSettings) -> Sequence[Trajectory]:
        generated = await self._pool.generate(prompt, settings)
        what, timeout_s = f"the samples of prompt {prompt.prompt_id}", self._limits.object_s
        try:
            [group] = await asyncio.to_thread(fetch, [generated.group], timeout_s=timeout_s, what=what)
        except LostObjectError as error:
            raise RolloutError(str(error)) from error  # which is retried
        return group.trajectories

    def _checked(self, call: SampleCall) -> tuple[Prompt, SamplingSettings]:
        """Returns the prompt under a unique id, and the engine's settings. Greedy samples are equal: one is drawn."""
        prompt, limits = call.prompt, self._limits
        room = limits.max_model_len - prompt.num_tokens
        if prompt.num_tokens == 0 or room < 1:
            raise ValueError(
                f"a prompt has 1 to {limits.max_model_len - 1} tokens, got {prompt.num_tokens}: "
                f"sampler.max_model_len={limits.max_model_len} counts the prompt and at least one sampled token"
            )
        low, high = int(prompt.expanded_ids.min()), int(prompt.expanded_ids.max())
        if low < 0 or high >= limits.num_token_ids:
            wrong = low if low < 0 else high
            raise ValueError(f"token id {wrong} of the prompt is not in 0 .. {limits.num_token_ids - 1}")
        settings = replace(
            call.settings,
            num_samples=1 if call.settings.temperature == 0 else call.settings.num_samples,
            max_tokens=min(call.settings.max_tokens, room),
            adapter=call.adapter,
            stop_token_ids=call.stop_token_ids,
        )
        # The sample id names the content: a prompt that crashes engines is excluded under every call's id.
        content = hashlib.sha256(prompt.expanded_ids.tobytes()).hexdigest()[:16]
        return replace(prompt, prompt_id=f"call/{next(self._numbers)}", sample_id=content), settings

    async def _load_on_all(self, adapter: str, folder: Path, loaded: set[Engine]) -> None:
        """Loads an adapter on every engine, and adds the engines to `loaded`. Engines that join meanwhile are included:
        `_admit` gives them served adapters alone, because an adapter that kills engines would also kill their
        successors."""
        num_tries = 0
        while missing := await self._without(loaded, adapter):
            if num_tries == LOADING_TRIES:
                raise RolloutError(f"engines were lost while they loaded adapter {adapter!r}: see their logs")
            loads = (self._load(engine, adapter, folder) for engine in missing)
            results = await asyncio.gather(*loads, return_exceptions=True)
            loaded |= {engine for engine, result in zip(missing, results, strict=True) if result is True}
            if error := next((result for result in results if isinstance(result, BaseException)), None):
                raise error
            num_tries += not all(results)
        self._folders[adapter] = folder  # in one step with the check that no engine is missing

    async def _without(self, loaded: Collection[Engine], adapter: str) -> list[Engine]:
        await self._pool.wait_for_an_engine(f"adapter {adapter!r}")
        return [engine for engine in self._pool.receivers() if engine not in loaded]

    async def _load(self, engine: Engine, adapter: str, folder: Path) -> bool:
        """Loads an adapter on one engine. Returns False if the engine is lost."""
        try:
            await engine.serve(adapter, folder)
        except (WorkerDiedError, EngineDiedError, DeadlineError) as error:
            self._pool.lose(engine, error)
            return False
        return True

    async def _unload(self, engine: Engine, adapter: str) -> None:
        try:
            await engine.withdraw(adapter)
        except ValueError as error:  # this engine could not load it
            _logger.info("%s: %s", engine.name, error)
        except (WorkerDiedError, EngineDiedError) as error:
            self._pool.lose(engine, error)

    async def _admit(self, engine: Engine) -> int:
        """Loads every served adapter on an engine that joins. An adapter that cannot be loaded affects no other."""
        version = await engine.weight_version()
        done: set[str] = set()
        while missing := [name for name in self._folders if name not in done]:
            for name in missing:
                done.add(name)
                if (folder := self._folders.get(name)) is None:  # withdrawn meanwhile
                    continue
                try:
                    await engine.serve(name, folder)
                except ValueError:
                    _logger.exception("%s cannot load adapter %s and refuses its calls", engine.name, name)
                    continue
                if name not in self._folders:
                    await engine.withdraw(name)
        return version

    def _check_served(self, adapter: str) -> None:
        if adapter not in self._folders:
            names = ", ".join(sorted(self._folders)) or "none"
            raise ValueError(f"adapter {adapter!r} is not served (served: {names}): serve it first")


def _scored(trajectory: Trajectory) -> ScoredTokens:
    assert isinstance(trajectory.actions, TokenActions), "engines of a training service sample tokens"
    reason = "length" if trajectory.finish_reason is FinishReason.LENGTH else "stop"
    return ScoredTokens(trajectory.actions.token_ids, trajectory.behavior_logprobs, reason)
