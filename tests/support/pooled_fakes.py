"""The run's own rollout pool over fake engines that do not fail, for runs whose time is turns of the event loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fakes import FakeRollouts

from mobula.cluster.records.trajectory import Generated, Prompt
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.rollout.rollout_pool import HealthChecks, RolloutPool
from mobula.cluster.workers.status import RestartPolicy

T = TypeVar("T")
LONG_S = 1e9
NO_RESTART = RestartPolicy(max_restarts=0, window_s=LONG_S, backoff_s=0.0, max_backoff_s=0.0)


class FakeEngine:
    """Implements `mobula.cluster.rollout.rollout_pool.Engine`: samples as `source` does, which all engines share."""

    def __init__(self, name: str, source: FakeRollouts) -> None:
        self.name = name
        self._source = source

    async def start(self) -> None: ...

    async def generate(self, prompt: Prompt, settings: SamplingSettings) -> Generated:
        return await self._source.generate(prompt, settings)

    async def is_alive(self) -> None: ...

    async def probe(self) -> None: ...

    async def weight_version(self) -> int:
        return self._source.version

    async def close(self) -> None: ...


class PooledRollouts:
    """`RolloutPool` over such engines; to set `version` is a push that reaches all of them."""

    def __init__(self, source: FakeRollouts, num_engines: int = 2) -> None:
        self._source = source

        async def spawn(index: int) -> FakeEngine:
            return FakeEngine(f"rollout/{index}", source)

        self.pool = RolloutPool(
            spawn,
            num_engines,
            release=_release,
            policy=NO_RESTART,
            health=HealthChecks(
                interval_s=LONG_S, probe_interval_s=LONG_S, max_failures_in_a_row=1, no_worker_s=LONG_S
            ),
            on_lost=_refuse_loss,
        )

    @property
    def attempts(self) -> Counter[str]:
        """How often each prompt was sampled."""
        return self._source.attempts

    @property
    def num_in_flight(self) -> int:
        """Prompts that are being sampled."""
        return self._source.num_in_flight

    @property
    def version(self) -> int:
        return self._source.version

    @version.setter
    def version(self, version: int) -> None:
        self.pool.announced(version)
        self._source.version = version
        for engine in self.pool.receivers():
            self.pool.synced(engine, version)
        self.pool.published(version)

    async def generate(self, prompt: Prompt, settings: SamplingSettings) -> Generated:
        return await self.pool.generate(prompt, settings)

    async def during(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `work()`, which runs while the pool serves."""
        await self.pool.start()
        async with self.pool.tended():
            result = await work()
        await self.pool.close()
        return result


async def _release(index: int) -> None: ...


def _refuse_loss(kind: str) -> None:
    raise AssertionError(f"an engine that does not fail was lost: {kind}")
