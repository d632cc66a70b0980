"""The processor workers as the driver sees them: rows out, prompts in; media stay in the object store."""

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
from mobula.cluster.workers.restart_policy import RestartPolicy
from mobula.cluster.workers.work_queue import Hosts, WorkerSlot, WorkQueue

DIED, HUNG = "processor_died", "processor_hung"
MAX_LOAD = 2  # calls at one worker: it need not wait for the driver between two rows
LOADS_AHEAD = 2  # prompts that are begun, over those that workers have: a long video does not hold up the others
MAX_LOSSES = 3  # workers, or answers of them, over one row: it is skipped then, as the likely cause
MAX_REMEMBERED = 1 << 16  # rows whose media keys are remembered
MAX_SHARED = 64  # media that several rows have


class ProcessorPool:
    """Implements `mobula.actors.datasets.prompts.Preparation`: prompts are prepared by `ProcessorWorker` actors.

    The first result of a call, the prompt, comes here; the others are references to processed media, which this process
    owns and `media` keeps. A worker does not process what the row had before: the call names those media by key. A row
    whose worker died or hangs goes to another one.

    Prompts are begun on any thread but that of the event loop in which the pool was made, because their callers wait.
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
        """`handles` are Ray handles of `ProcessorWorker`s; `num_media(row)` is how many media its prompt will have.

        `timeout_s` is for one row, `object_s` for bringing media to this node. `on_lost` is called with the kind of
        each loss of a worker.
        """
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
        self._timeout_s = timeout_s * MAX_LOAD
        self._object_s = object_s
        self._loop = asyncio.get_running_loop()
        self._keys: OrderedDict[str, tuple[str, ...]] = OrderedDict()  # sample -> keys of its media
        self._shared: OrderedDict[str, None] = OrderedDict()

    async def start(self) -> None:
        """Wait until the first workers are built; raises what `WorkQueue.start` does."""
        await self._work.start()

    @property
    def num_ahead(self) -> int:
        return max(1, LOADS_AHEAD * MAX_LOAD * len(self._work.handles))

    def begin(self, row: Any, prompt_id: str) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(self.prepare(row, prompt_id), self._loop)

    async def prepare(self, row: Any, prompt_id: str) -> Prompt | ScoredGroup:
        """The prompt of a row.

        Raises:
            RowError: the row is unusable, or `MAX_LOSSES` workers were lost over it.
            WorkerDiedError: no worker is left, and none is restarted.
        """
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
        if num_media:  # Ray takes a list apart only when several results are asked for
            call = slot.handle.prepare.options(num_returns=1 + num_media)
            said, *references = call.remote(row, prompt_id, frozenset(held))
        else:
            said, references = slot.handle.prepare_text.remote(row, prompt_id), []
        what = f"{slot.name} to prepare {row.sample_id} (timeouts.prepare_s)"
        made: Made = await answer(said, timeout_s=self._timeout_s, what=what)
        if made.prompt is None:
            raise RowError(made.reason, made.detail, row.sample_id)
        prompt = prompt_of(made.prompt)
        new = [r for r, handle in zip(references, prompt.media, strict=True) if handle.key not in held]
        await bring_here(new, timeout_s=self._object_s, what=f"media of {row.sample_id}")
        media = tuple(self._kept(h, r, held) for h, r in zip(prompt.media, references, strict=True))
        self._remember(row.sample_id, media)
        return _with_media(made.prompt, media)

    def _held(self, sample_id: str) -> dict[str, MediaHandle]:
        """Media that need not be processed again, by key: what the row had before, and what several rows have."""
        keys = (*self._keys.get(sample_id, ()), *self._shared)
        found = ((key, self._media.find(key)) for key in keys)
        return {key: handle for key, handle in found if handle is not None}

    def _kept(self, handle: MediaHandle, reference: Any, held: dict[str, MediaHandle]) -> MediaHandle:
        """The handle of a medium with its reference; of equal media the first one is kept."""
        if handle.key in held:
            return self._media.keep(held[handle.key])
        kept = self._media.keep(replace(handle, reference=reference))
        if kept.reference is not reference:
            self._shared[handle.key] = None
            self._shared.move_to_end(handle.key)
            if len(self._shared) > MAX_SHARED:
                self._shared.popitem(last=False)
        held[handle.key] = kept  # further places of it in this prompt have no value of their own
        return kept

    def _remember(self, sample_id: str, media: Sequence[MediaHandle]) -> None:
        if not media:
            return
        self._keys[sample_id] = tuple(handle.key for handle in media)
        self._keys.move_to_end(sample_id)
        if len(self._keys) > MAX_REMEMBERED:
            self._keys.popitem(last=False)

    async def _join(self, name: str, handle: Any) -> None:
        what = f"{name} to start (timeouts.start_s)"
        await answer(handle.ping.remote(), timeout_s=self._start_s, what=what)


def _with_media(made: Prompt | ScoredGroup, media: tuple[MediaHandle, ...]) -> Prompt | ScoredGroup:
    if isinstance(made, Prompt):
        return replace(made, media=media)
    return replace(made, group=replace(made.group, prompt=replace(made.group.prompt, media=media)))
