"""ProcessorPool: sends rows to processor workers and receives prompts; media stay in the object store."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from mobula.actors.datasets.rows import RowError
from mobula.actors.processors.worker import Made, prompt_of
from mobula.cluster.errors import DeadlineError, WorkerDiedError
from mobula.cluster.records.media import MediaHandle, MediaStore
from mobula.cluster.records.trajectory import Prompt, ScoredGroup
from mobula.cluster.runtime.object_store import bring_here
from mobula.cluster.runtime.ray_actors import answer
from mobula.cluster.workers.status import RestartPolicy
from mobula.cluster.workers.work_queue import Hosts, WorkerSlot, WorkQueue

DIED, HUNG = "processor_died", "processor_hung"
MAX_LOAD = 2  # calls in flight per worker: the worker does not idle while the driver sends the next row
LOADS_AHEAD = 2  # prompts begun per call in flight: a long video does not block the prompts after it
MAX_LOSSES = 3  # lost workers or replies after which a row is skipped as the likely cause
MAX_REMEMBERED = 1 << 16  # rows with remembered media keys
MAX_SHARED = 64  # remembered media that several rows share


class ProcessorPool:
    """Implements `mobula.actors.datasets.prompts.Preparation`: `ProcessorWorker` actors prepare the prompts.

    The first result of a call, the prompt, is fetched. The others are references to processed media, which this process
    owns and `media` stores. The call names the stored media of the row by key, so that the worker does not process them
    again. If a worker dies or hangs, the row goes to another worker.

    Callers of `begin` block on the future: never call it on the thread of the event loop that built the pool.
    """

    def __init__(
        self,
        handles: Sequence[Any],
        media: MediaStore,
        num_media: Callable[[Any], int],
        *,
        hosts: Hosts,
        restarts: RestartPolicy,
        start_s: float,
        alive_s: float,
        timeout_s: float,
        object_s: float,
        on_lost: Callable[[str], None],
    ) -> None:
        """`num_media` returns the number of media in a row's prompt. `timeout_s` is for one row, `object_s` for the
        transfer of media to this node. `on_lost` gets `processor_died` or `processor_hung` for each lost worker."""
        self._work = WorkQueue(
            "processor",
            handles,
            hosts,
            max_load=MAX_LOAD,
            restarts=restarts,
            alive_s=alive_s,
            join=self._join,
            on_lost=lambda error: on_lost(HUNG if isinstance(error, DeadlineError) else DIED),
        )
        self.pool = self._work.pool
        self._media = media
        self._num_media = num_media
        self._start_s = start_s
        self._timeout_s = timeout_s * MAX_LOAD  # a call waits for the calls before it at its worker
        self._object_s = object_s
        self._loop = asyncio.get_running_loop()
        self._keys: OrderedDict[str, tuple[str, ...]] = OrderedDict()  # sample -> keys of its media
        self._shared: OrderedDict[str, None] = OrderedDict()

    async def start(self) -> None:
        """Waits until the first workers are built. Raises as `WorkQueue.start`."""
        await self._work.start()

    @property
    def num_ahead(self) -> int:
        return max(1, LOADS_AHEAD * MAX_LOAD * len(self._work.handles))

    def begin(self, row: Any, prompt_id: str) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(self.prepare(row, prompt_id), self._loop)

    async def prepare(self, row: Any, prompt_id: str) -> Prompt | ScoredGroup:
        lost: list[str] = []
        while len(lost) < MAX_LOSSES:
            async with self._work.slot(is_urgent=bool(lost)) as slot:
                try:
                    return await self._prepare_at(slot, row, prompt_id)
                except (WorkerDiedError, DeadlineError) as error:
                    lost.append(str(await self._work.failed(slot, error)))
        raise RowError(
            "killed_processors",
            f"{len(lost)} processor workers, or their answers, were lost over {row.sample_id}, the last one with: "
            f"{lost[-1]}; remove the row, or raise timeouts.prepare_s if its media take that long",
            row.sample_id,
        )

    async def _prepare_at(self, slot: WorkerSlot, row: Any, prompt_id: str) -> Prompt | ScoredGroup:
        held = self._held(row.sample_id)
        num_media = self._num_media(row)
        if num_media:  # Ray unpacks a returned list only if num_returns > 1
            call = slot.handle.prepare.options(num_returns=1 + num_media)
            prepared, *references = call.remote(row, prompt_id, frozenset(held))
        else:
            prepared, references = slot.handle.prepare_text.remote(row, prompt_id), []
        what = f"{slot.name} to prepare {row.sample_id} (timeouts.prepare_s)"
        made: Made = await answer(prepared, timeout_s=self._timeout_s, what=what)
        if made.prompt is None:
            raise RowError(made.reason, made.detail, row.sample_id)
        prompt = prompt_of(made.prompt)
        new = [r for r, handle in zip(references, prompt.media, strict=True) if handle.key not in held]
        await bring_here(new, timeout_s=self._object_s, what=f"media of {row.sample_id}")
        media = tuple(self._kept(h, r, held) for h, r in zip(prompt.media, references, strict=True))
        self._remember(row.sample_id, media)
        prompt = replace(prompt, media=media)
        if isinstance(made.prompt, Prompt):
            return prompt
        return replace(made.prompt, group=replace(made.prompt.group, prompt=prompt))

    def _held(self, sample_id: str) -> dict[str, MediaHandle]:
        """Stored media, by key: those of earlier prompts of the row, and those that several rows share."""
        keys = (*self._keys.get(sample_id, ()), *self._shared)
        handles = ((key, self._media.find(key)) for key in keys)
        return {key: handle for key, handle in handles if handle is not None}

    def _kept(self, handle: MediaHandle, reference: Any, held: dict[str, MediaHandle]) -> MediaHandle:
        """Stores the handle of a medium with its reference; of equal media the first is stored."""
        if handle.key in held:
            return self._media.keep(held[handle.key])
        kept = self._media.keep(replace(handle, reference=reference))
        if kept.reference is not reference:
            self._shared[handle.key] = None
            self._shared.move_to_end(handle.key)
            if len(self._shared) > MAX_SHARED:
                self._shared.popitem(last=False)
        held[handle.key] = kept  # the worker returns None for repetitions in this prompt
        return kept

    def _remember(self, sample_id: str, media: Sequence[MediaHandle]) -> None:
        if not media:
            return
        self._keys[sample_id] = tuple(handle.key for handle in media)
        self._keys.move_to_end(sample_id)
        if len(self._keys) > MAX_REMEMBERED:
            self._keys.popitem(last=False)

    async def _join(self, name: str, handle: Any) -> None:
        await answer(handle.ping.remote(), timeout_s=self._start_s, what=f"{name} to start (timeouts.start_s)")
