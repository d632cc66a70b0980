"""Engines that die, hang, slow down and lose replies at given moments, for runs in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from fakes import NUM_TOKENS, FakeLearner, make_group

from cluster.errors import DeadlineError, WorkerDiedError
from cluster.records.trajectory import Generated, Prompt, ScoredGroup
from cluster.roles import SamplingSettings, UpdateReport

DEADLINE_S = 60.0  # for one group
CONNECT_S = 4.0  # until a call notices that its engine is down
SLOWNESS = 30


class Kind(StrEnum):
    DIE = "die"  # what it was doing is lost; calls fail until it is back
    HANG = "hang"  # it stands still, then goes on as if nothing had been
    SLOW = "slow"
    LOSE_REPLY = "lose_reply"  # what it finishes meanwhile is never heard of


@dataclass(frozen=True)
class Fault:
    """Engine `engine` is at fault from `at_s` for `for_s` seconds."""

    kind: Kind
    engine: int
    at_s: float
    for_s: float

    @property
    def end_s(self) -> float:
        return self.at_s + self.for_s


class FaultyEngine:
    """Samples a token in a second or many, whatever else it does; each with the version that its pool then has."""

    def __init__(self, faults: Sequence[Fault], timing: int) -> None:
        self.num_in_flight = 0
        self._faults = faults
        self._timing = timing

    async def sample(self, prompt: Prompt, min_version: int, pool: FaultyRolloutPool) -> Generated:
        await asyncio.sleep(CONNECT_S)
        self._check_alive(since_s=_now())
        while pool.version < min_version:
            await asyncio.sleep(CONNECT_S)
        versions = []
        for _ in range(NUM_TOKENS):
            await self._sample_token(random.Random(f"{self._timing}/{prompt.prompt_id}").choice([0.1, 1, 2, 3, 15]))
            versions.append(pool.version)
        if self._at_fault(Kind.LOSE_REPLY):
            await asyncio.Event().wait()
        group = make_group(prompt, versions)
        return Generated(group, group.summary())

    async def _sample_token(self, seconds: float) -> None:
        started_s = _now()
        await asyncio.sleep(seconds * (SLOWNESS if self._at_fault(Kind.SLOW) else 1))
        while hangs := self._at_fault(Kind.HANG):
            await asyncio.sleep(max(fault.end_s for fault in hangs) - _now())
        self._check_alive(since_s=started_s)

    def _check_alive(self, since_s: float) -> None:
        if any(f.kind is Kind.DIE and f.at_s <= _now() and since_s < f.end_s for f in self._faults):
            raise WorkerDiedError("its engine died")

    def _at_fault(self, kind: Kind) -> list[Fault]:
        return [fault for fault in self._faults if fault.kind is kind and fault.at_s <= _now() < fault.end_s]


class FaultyRolloutPool:
    """A rollout pool of such engines that knows nothing of their state: a dead one, idle, is its first choice.

    As with an actor in another process, a call that ran into its deadline goes on unheard. `failures` counts by kind.
    """

    def __init__(self, num_engines: int, faults: Sequence[Fault] = (), timing: int = 0) -> None:
        self.version = 0
        self.failures: Counter[str] = Counter()
        self._engines = [FaultyEngine([f for f in faults if f.engine == i], timing) for i in range(num_engines)]
        self._unheard: set[asyncio.Task[object]] = set()

    async def generate(self, prompt: Prompt, settings: SamplingSettings) -> Generated:
        engine = min(self._engines, key=lambda engine: engine.num_in_flight)
        engine.num_in_flight += 1
        call = asyncio.create_task(engine.sample(prompt, settings.min_version, self))
        try:
            return await asyncio.wait_for(asyncio.shield(call), DEADLINE_S)
        except TimeoutError:
            self.failures["deadline"] += 1
            self._leave(call)
            raise DeadlineError(f"waited {DEADLINE_S:g} s for prompt {prompt.prompt_id}") from None
        except WorkerDiedError:
            self.failures["died"] += 1
            raise
        finally:
            engine.num_in_flight -= 1

    def _leave(self, call: asyncio.Task[object]) -> None:
        self._unheard.add(call)
        call.add_done_callback(lambda done: done.cancelled() or done.exception())
        call.add_done_callback(self._unheard.discard)


class TimedLearner(FakeLearner):
    """An update takes seconds, so that rollouts may run ahead of it."""

    def __init__(self, seconds: float) -> None:
        super().__init__(num_turns=0)
        self._seconds = seconds

    async def update(self, groups: Sequence[ScoredGroup]) -> UpdateReport:
        await asyncio.sleep(self._seconds)
        return await super().update(groups)


def _now() -> float:
    return asyncio.get_running_loop().time()
