"""ReferencePool: distributes groups over the reference scorers; NullReference is for runs without a KL term."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, replace
from pathlib import Path
from typing import Any

from mobula.cluster.errors import DeadlineError, WorkerDiedError
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.runtime.concurrency import run_all
from mobula.cluster.runtime.ray_actors import answer
from mobula.cluster.workers.status import RestartPolicy
from mobula.cluster.workers.work_queue import Hosts, WorkerSlot, WorkQueue

DIED, HUNG = "reference_died", "reference_hung"


@dataclass(eq=False)
class ReferencePool:
    """Divides the groups of one step among the scorers; log-probs stay in the object store, owned by the caller.

    Implements `mobula.cluster.roles.Reference`; `pool` holds the scorers. A scorer that died or hangs is counted in
    `losses` and replaced. A share that was not answered within `timeout_s` goes to the next free scorer,
    up to `max_attempts` times in all.
    """

    handles: InitVar[Sequence[Any]]  # Ray handles of `ReferenceScorer`s
    folder: Path  # has the frozen policy once the run has begun
    _: KW_ONLY
    hosts: InitVar[Hosts]
    restarts: InitVar[RestartPolicy]
    alive_s: InitVar[float]
    timeout_s: float
    max_attempts: int
    on_lost: Callable[[str], None] = lambda kind: None  # called with the kind of each loss of a scorer
    on_retry: Callable[[str], None] = lambda kind: None  # called with the reason why a share is repeated

    def __post_init__(self, handles: Sequence[Any], hosts: Hosts, restarts: RestartPolicy, alive_s: float) -> None:
        self._work = WorkQueue(
            "reference",
            handles,
            hosts,
            max_load=1,
            restarts=restarts,
            alive_s=alive_s,
            join=self._join,
            on_lost=self._count_loss,
        )
        self.pool = self._work.pool
        self._has_begun = False
        self._loaded: dict[str, Any] = {}  # name -> the handle that holds the frozen policy
        self.losses: Counter[str] = Counter({DIED: 0, HUNG: 0})

    async def score(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """Returns the groups, in order, with `reference_logprobs` set to object references."""
        self._has_begun = True
        num_shares = max(1, min(len(groups), len(self._work.handles)))
        shares = [list(groups[first::num_shares]) for first in range(num_shares)]
        parts = await run_all(*(self._score_somewhere(share) for share in shares))
        scored = {group.summary.group_id: group for part in parts for group in part}
        return [scored[group.summary.group_id] for group in groups]

    async def _score_somewhere(self, groups: list[ScoredGroup]) -> list[ScoredGroup]:
        for attempt in range(1, self.max_attempts + 1):
            async with self._work.slot(is_urgent=attempt > 1) as slot:
                try:
                    await self._load(slot.name, slot.handle)
                    return await self._score(slot, groups)
                except (WorkerDiedError, DeadlineError) as error:
                    loss = await self._work.failed(slot, error)
            if attempt == self.max_attempts:
                raise loss
            self.on_retry(type(loss).__name__)
        raise AssertionError("max_attempts is 1 or more")

    async def _join(self, name: str, handle: Any) -> None:
        """Loads the frozen policy in a replaced scorer; the first scorers load it with their first groups."""
        if self._has_begun:
            await self._load(name, handle)

    async def _load(self, name: str, handle: Any) -> None:
        if name in self._loaded and self._loaded[name] is handle:
            return
        await answer(handle.load.remote(self.folder), timeout_s=self.timeout_s, what=f"{name} to load {self.folder}")
        self._loaded[name] = handle

    async def _score(self, slot: WorkerSlot, groups: list[ScoredGroup]) -> list[ScoredGroup]:
        """Scores groups in one call. Its results are stored together, so waiting for the last fetches no other."""
        scorer = slot.handle
        if len(groups) == 1:  # Ray splits a returned list only with num_returns above 1
            logprobs = [scorer.score_one.remote(groups[0])]
        else:
            logprobs = scorer.score.options(num_returns=len(groups)).remote(groups)
        await answer(logprobs[-1], timeout_s=self.timeout_s, what=f"{slot.name} to score {len(groups)} groups")
        return [replace(g, reference_logprobs=lp) for g, lp in zip(groups, logprobs, strict=True)]

    def _count_loss(self, error: Exception) -> None:
        kind = HUNG if isinstance(error, DeadlineError) else DIED
        self.losses[kind] += 1
        self.on_lost(kind)


class NullReference:
    """Returns groups unchanged."""

    async def score(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        return list(groups)
