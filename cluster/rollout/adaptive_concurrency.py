"""Adapts the number of groups in flight to the load that engines report: additive increase, multiplicative decrease."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from mobula.cluster.rollout.rollout_pool import Engine
from mobula.cluster.rollout.staleness import StalenessGate
from mobula.cluster.runtime.concurrency import outcomes
from mobula.cluster.runtime.vitals import EngineLoad
from mobula.cluster.workers.supervisor import background_tasks

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AimdPolicy:
    """The bounds of the limit, and what moves it."""

    min_groups: int
    max_groups: int
    increase: int  # groups a look, while engines are calm and the limit is what holds them
    decrease: float  # factor, when engines are overloaded
    calm_kv_usage: float  # share of the KV cache that every engine stays below while the limit grows
    high_kv_usage: float  # share from which on an engine is overloaded
    max_waiting: int  # responses that may wait in one engine's queue


class AimdLimit:
    """Additive increase, multiplicative decrease (Chiu and Jain 1989, doi:10.1016/0169-7552(89)90019-6).

    An engine is overloaded when it has preempted a response since the look before, when its queue is longer than
    `max_waiting`, or when its KV cache is fuller than `high_kv_usage`. Then the limit falls at once, and not again
    before what runs is within it: until then engines still show the load of the old limit. It grows only where all
    engines were heard, and where it is what holds them back.

    Example: limit = AimdLimit(policy, start=64); gate.set_max_concurrent(limit.observe(loads, len(gate.running)))
    """

    def __init__(self, policy: AimdPolicy, *, start: int) -> None:
        self.value = min(max(start, policy.min_groups), policy.max_groups)
        self._policy = policy
        self._num_preemptions: dict[str, int] = {}
        self._is_falling = False

    def observe(self, loads: Sequence[EngineLoad | None], num_running: int) -> int:
        """The limit after one look: each engine's load, None where it could not be had, and the groups that run."""
        policy, known = self._policy, [load for load in loads if load is not None]
        preempted = [load for load in known if self._has_preempted(load)]
        self._is_falling = self._is_falling and num_running > self.value
        if preempted or any(self._is_overloaded(load) for load in known):
            if not self._is_falling:
                self.value = max(policy.min_groups, int(self.value * policy.decrease))
                self._is_falling = num_running > self.value
        elif known and len(known) == len(loads) and num_running >= self.value and all(map(self._is_calm, known)):
            self.value = min(policy.max_groups, self.value + policy.increase)
        return self.value

    def _has_preempted(self, load: EngineLoad) -> bool:
        """Since the look before; an engine that was started again counts from 0."""
        before = self._num_preemptions[load.name] if load.name in self._num_preemptions else load.num_preemptions
        self._num_preemptions[load.name] = load.num_preemptions
        return load.num_preemptions > before

    def _is_overloaded(self, load: EngineLoad) -> bool:
        return load.num_waiting > self._policy.max_waiting or load.kv_usage > self._policy.high_kv_usage

    def _is_calm(self, load: EngineLoad) -> bool:
        return load.num_waiting == 0 and load.kv_usage < self._policy.calm_kv_usage


class AdaptiveConcurrency:
    """Moves the gate's limit after each look at the engines; a `cluster.workers.supervisor.Pool` without workers."""

    def __init__(
        self,
        engines: Callable[[], Sequence[Engine]],
        gate: StalenessGate,
        limit: AimdLimit,
        *,
        interval_s: float,
        on_limit: Callable[[int, Sequence[EngineLoad]], None],
    ) -> None:
        """`engines()` lists those that serve; `on_limit` is called with the limit and the loads after each check."""
        self._engines = engines
        self._gate = gate
        self._limit = limit
        self._interval_s = interval_s
        self._on_limit = on_limit
        gate.set_max_concurrent(limit.value)

    @asynccontextmanager
    async def tended(self) -> AsyncIterator[None]:
        """Look at the engines while the body runs."""
        async with background_tasks() as tasks:
            tasks.create_task(self._watch(), name="look at the engines' load")
            yield

    async def close(self) -> None:
        """There is nothing to close."""

    async def look(self) -> None:
        """Ask every engine once; an engine that does not answer is replaced by its pool."""
        found = await outcomes(*(engine.load() for engine in self._engines()))
        loads = [None if isinstance(load, Exception) else load for load in found]
        before = self._limit.value
        self._gate.set_max_concurrent(self._limit.observe(loads, len(self._gate.running)))
        if self._limit.value < before:
            _logger.info("at most %d groups run now, %d before: engines are overloaded", self._limit.value, before)
        self._on_limit(self._limit.value, [load for load in loads if load is not None])

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self.look()
