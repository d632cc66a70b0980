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
    """Bounds of the limit, and the thresholds that move it."""

    min_groups: int
    max_groups: int
    increase: int  # groups per observation, while engines are calm and the limit is reached
    decrease: float  # factor, when engines are overloaded
    calm_kv_usage: float  # the limit grows while the KV usage (0 to 1) of every engine is below this
    high_kv_usage: float  # an engine with a higher KV usage is overloaded
    max_waiting: int  # an engine with more queued responses is overloaded


class AimdLimit:
    """Additive increase, multiplicative decrease (Chiu and Jain 1989, doi:10.1016/0169-7552(89)90019-6).

    An engine is overloaded when it preempted a response since the previous observation, when its queue is longer than
    `max_waiting`, or when its KV usage is above `high_kv_usage`. Then the limit falls at once, and not again before the
    running groups are within it: until then engines show the load of the old limit. The limit grows only if all engines
    answered and the running groups reach it.

    Example: limit = AimdLimit(policy, start=64); gate.set_max_concurrent(limit.observe(loads, len(gate.running)))
    """

    def __init__(self, policy: AimdPolicy, *, start: int) -> None:
        self.value = min(max(start, policy.min_groups), policy.max_groups)
        self._policy = policy
        self._num_preemptions: dict[str, int] = {}
        self._is_falling = False

    def observe(self, loads: Sequence[EngineLoad | None], num_running: int) -> int:
        """Returns the limit after one observation: the load of each engine (None: no answer) and the running groups."""
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
        """Whether an engine preempted since the previous observation. The count of a restarted engine begins at 0."""
        before = self._num_preemptions[load.name] if load.name in self._num_preemptions else load.num_preemptions
        self._num_preemptions[load.name] = load.num_preemptions
        return load.num_preemptions > before

    def _is_overloaded(self, load: EngineLoad) -> bool:
        return load.num_waiting > self._policy.max_waiting or load.kv_usage > self._policy.high_kv_usage

    def _is_calm(self, load: EngineLoad) -> bool:
        return load.num_waiting == 0 and load.kv_usage < self._policy.calm_kv_usage


class AdaptiveConcurrency:
    """Adapts the gate's limit to the engines' load. Implements `cluster.workers.supervisor.Pool`, without workers."""

    def __init__(
        self,
        engines: Callable[[], Sequence[Engine]],
        gate: StalenessGate,
        limit: AimdLimit,
        *,
        interval_s: float,
        on_limit: Callable[[int, Sequence[EngineLoad]], None],
    ) -> None:
        """`engines()` lists the serving engines. `on_limit` gets the limit and the loads after each observation."""
        self._engines = engines
        self._gate = gate
        self._limit = limit
        self._interval_s = interval_s
        self._on_limit = on_limit
        gate.set_max_concurrent(limit.value)

    @asynccontextmanager
    async def tended(self) -> AsyncIterator[None]:
        """Observes the engines while the body runs."""
        async with background_tasks() as tasks:
            tasks.create_task(self._watch(), name="observe the engines' load")
            yield

    async def close(self) -> None:
        """Does nothing: there are no workers."""

    async def observe(self) -> None:
        """Asks every engine for its load and moves the limit. The pool replaces engines that do not answer."""
        answers = await outcomes(*(engine.load() for engine in self._engines()))
        loads = [None if isinstance(answer, Exception) else answer for answer in answers]
        before = self._limit.value
        self._gate.set_max_concurrent(self._limit.observe(loads, len(self._gate.running)))
        if self._limit.value < before:
            _logger.info("engines are overloaded: at most %d groups in flight, %d before", self._limit.value, before)
        self._on_limit(self._limit.value, [load for load in loads if load is not None])

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self.observe()
