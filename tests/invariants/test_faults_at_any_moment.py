"""Whatever engines do at whatever moment: the run ends, and has trained on the very prompts of a run without faults.

The engines of the run's own rollout pool die, hang, slow down and lose replies at given moments, in virtual time.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import pytest
from fakes import NUM_TOKENS, FakeLearner, make_group
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import PooledRollouts, Run, release

from mobula.cluster.errors import DeadlineError, MobulaError, WorkerDiedError
from mobula.cluster.records.trajectory import Generated, Prompt, ScoredGroup
from mobula.cluster.replay.buffer import DUPLICATE
from mobula.cluster.roles import SamplingSettings, UpdateReport
from mobula.cluster.rollout.rollout_pool import HealthChecks, RolloutPool
from mobula.cluster.workers.status import RestartPolicy
from mobula.deploy.rehearsal.simulated.machine import run_virtually

T = TypeVar("T")
STEPS, SIZE, ENGINES = 6, 3, 3
RUN_S = 150.0  # about as long as a run without faults takes
DEADLINE_S = 60.0  # for one group
PROBE_S = 10.0  # for one token; a slow engine needs a third of it
CONNECT_S = 4.0  # until a call has reached its engine
CHECK_S = 10.0  # between two checks of an engine
SLOWNESS = 30
NEVER_EXHAUSTED = RestartPolicy(max_restarts=10_000, window_s=1e9, backoff_s=1.0, max_backoff_s=1.0)


class Kind(StrEnum):
    DIE = "die"  # the process is lost; another one cannot start before the fault is over
    HANG = "hang"  # the process stands still, then goes on as if nothing had been
    SLOW = "slow"
    LOSE_REPLY = "lose_reply"  # the replies of what it finishes meanwhile are lost


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
    """Implements `cluster.rollout.rollout_pool.Engine`: samples a token in a second or many, with the version that it
    then serves.

    A fault that begins while the process lives happens to it; the next process of its seat starts when the seat is no
    longer one of a dead process.
    """

    def __init__(self, name: str, faults: Sequence[Fault], timing: int) -> None:
        self.name = name
        self.version = -1
        self._faults = faults
        self._timing = timing
        self._started_s = 0.0
        self._is_closed = asyncio.Event()

    async def start(self) -> None:
        while dead := [f for f in self._faults if f.kind is Kind.DIE and f.at_s <= _now() < f.end_s]:
            await asyncio.sleep(max(fault.end_s for fault in dead) - _now())
        self._started_s = _now()

    async def generate(self, prompt: Prompt, settings: SamplingSettings) -> Generated:
        return await self._call(self._sample(prompt, settings), DEADLINE_S, f"generate prompt {prompt.prompt_id}")

    async def is_alive(self) -> None:
        self._check_alive()

    async def probe(self) -> None:
        await self._call(self._sample_token(0.1), PROBE_S, "sample one token")

    async def weight_version(self) -> int:
        return self.version

    async def close(self) -> None:
        self._is_closed.set()

    def check_push(self) -> None:
        """Raises: WorkerDiedError, DeadlineError: it can take no weights now."""
        self._check_alive()
        if self._now_at(Kind.HANG):
            raise DeadlineError(f"waited for {self.name} to receive a version")

    async def _sample(self, prompt: Prompt, settings: SamplingSettings) -> Generated:
        await asyncio.sleep(CONNECT_S)
        while self.version < settings.min_version:
            await self._sample_token(CONNECT_S)
        versions = []
        for _ in range(NUM_TOKENS):
            await self._sample_token(random.Random(f"{self._timing}/{prompt.prompt_id}").choice([0.1, 1, 2, 3, 15]))
            versions.append(self.version)
        if self._now_at(Kind.LOSE_REPLY):
            await asyncio.Event().wait()
        group = make_group(prompt, versions)
        return Generated(group, group.summary())

    async def _sample_token(self, seconds: float) -> None:
        await asyncio.sleep(seconds * (SLOWNESS if self._now_at(Kind.SLOW) else 1))
        while hangs := self._now_at(Kind.HANG):
            await asyncio.sleep(max(fault.end_s for fault in hangs) - _now())
        self._check_alive()

    async def _call(self, work: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
        """The answer to a call with a deadline; the call ends early if the process is ended."""
        call, closed = asyncio.ensure_future(work), asyncio.ensure_future(self._is_closed.wait())
        try:
            done, _ = await asyncio.wait({call, closed}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if call in done:
                return call.result()
            if closed in done:
                raise WorkerDiedError(f"{self.name} is ended")
            raise DeadlineError(f"waited {timeout_s:g} s for {self.name} to {what}")
        finally:
            call.cancel()
            closed.cancel()

    def _check_alive(self) -> None:
        if self._is_closed.is_set() or any(f.kind is Kind.DIE for f in self._began()):
            raise WorkerDiedError(f"{self.name} died")

    def _now_at(self, kind: Kind) -> list[Fault]:
        return [fault for fault in self._began() if fault.kind is kind and _now() < fault.end_s]

    def _began(self) -> list[Fault]:
        """The faults that have happened to this process."""
        return [fault for fault in self._faults if self._started_s <= fault.at_s <= _now()]


class FaultyRollouts(PooledRollouts):
    """`RolloutPool` over such engines; `failures` counts calls that failed by the type of the error, `losses` engines
    that were replaced."""

    def __init__(self, num_engines: int, faults: Sequence[Fault] = (), timing: int = 0) -> None:
        self.failures: Counter[str] = Counter()
        self.losses: Counter[str] = Counter()
        self._version = -1

        async def spawn(index: int) -> FaultyEngine:
            return FaultyEngine(f"rollout/{index}", [fault for fault in faults if fault.engine == index], timing)

        health = HealthChecks(interval_s=CHECK_S, probe_interval_s=0.0, max_failures_in_a_row=3, no_worker_s=1e9)
        self.pool = RolloutPool(
            spawn, num_engines, release=release, policy=NEVER_EXHAUSTED, health=health, on_lost=self._lose
        )
        self.pool.admit_with(self._admit)

    async def generate(self, prompt: Prompt, settings: SamplingSettings) -> Generated:
        try:
            return await super().generate(prompt, settings)
        except MobulaError as error:
            self.failures[type(error).__name__] += 1
            raise

    @property
    def version(self) -> int:
        """The version that the engines serve; to set it is a push."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        self._version = version
        self.pool.announced(version)
        for engine in self.pool.receivers():
            assert isinstance(engine, FaultyEngine)
            try:
                engine.check_push()
            except MobulaError as error:
                self.pool.lose(engine, error)
            else:
                engine.version = version
                self.pool.synced(engine, version)
        self.pool.published(version)

    async def _admit(self, engine: FaultyEngine) -> int:
        engine.version = self._version
        return self._version

    def _lose(self, kind: str) -> None:
        self.losses[kind] += 1


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


faults = st.builds(
    Fault,
    kind=st.sampled_from(Kind),
    engine=st.integers(0, ENGINES - 1),
    at_s=st.floats(0, RUN_S),
    for_s=st.floats(0.01, RUN_S),
)
INJECTED = st.lists(faults, max_size=12)
NOTICED = ("rollout_died", "rollout_hung", "LostReplyError", "LostReplyError")  # of each kind


SHAPE = {"total_steps": STEPS, "prompts_per_step": SIZE, "max_concurrent": 8, "checkpoint_interval": 0}
MAX_RETRIES = 10_000  # an engine that is down fails call after call


def finished_run(injected: Sequence[Fault], *, timing: int = 0, **own: int) -> tuple[Run, FaultyRollouts]:
    def values(prompt_id: str) -> tuple[float, float]:
        return (1.0, random.Random(prompt_id).choice([0.0, 1.0]))

    pool = FaultyRollouts(ENGINES, injected, timing)
    with TemporaryDirectory() as folder:
        roles = {"rollouts": pool, "values": values, "learner": TimedLearner(seconds=5.0)}
        run = Run(Path(folder), max_retries=MAX_RETRIES, **SHAPE, **roles, **own)
        assert run_virtually(run.go()) == STEPS
    return run, pool


@cache
def synchronous_run(*, drop_uniform: bool) -> Run:
    """A run without faults at staleness 0."""
    return finished_run([], max_staleness=0, drop_uniform=drop_uniform)[0]


def trained_ids(run: Run) -> list[str]:
    return [prompt_id for step in run.learner.prompt_ids for prompt_id in step]


@settings(deadline=None)
@given(injected=INJECTED, max_staleness=st.integers(0, 4), drop_uniform=st.booleans(), timing=st.integers(0, 2**32))
def test_random_faults_lose_no_prompt_train_none_twice_and_change_none(
    injected: list[Fault], max_staleness: int, drop_uniform: bool, timing: int
) -> None:
    faultless = synchronous_run(drop_uniform=drop_uniform)
    run, _ = finished_run(injected, max_staleness=max_staleness, drop_uniform=drop_uniform, timing=timing)
    trained = trained_ids(run)
    assert sorted(trained) == sorted(trained_ids(faultless))
    assert len(set(trained)) == STEPS * SIZE
    ages = [version - group.summary.oldest_version for version, groups in run.learner.trained for group in groups]
    assert max(ages) <= max_staleness
    rejected = run_virtually(run.replay.stats()).num_rejected
    assert rejected.keys() <= {"uniform"}, f"{DUPLICATE}: a group arrived twice; stale: finished work was thrown away"
    assert run.dispatcher.pending() == ()
    assert run.dispatcher.state() == faultless.dispatcher.state(), "the same prompts were rejected, too"


@pytest.mark.parametrize("max_staleness", [0, 4])
@pytest.mark.parametrize(("kind", "noticed"), zip(Kind, NOTICED, strict=True))
def test_each_kind_of_fault_is_noticed_and_survived(kind: Kind, noticed: str, max_staleness: int) -> None:
    faultless, _ = finished_run([], max_staleness=max_staleness)
    injected = [Fault(kind, engine, at_s=20.0, for_s=70.0) for engine in range(2)]
    run, pool = finished_run(injected, max_staleness=max_staleness)
    found = pool.failures + pool.losses
    assert found[noticed] > 0, found
    assert sorted(trained_ids(run)) == sorted(trained_ids(faultless))


def test_all_engines_at_fault_at_once_only_take_time() -> None:
    kinds = (Kind.DIE, Kind.HANG)
    injected = [Fault(kind, engine, at_s=30.0, for_s=500.0) for kind in kinds for engine in range(ENGINES)]
    run, pool = finished_run(injected, max_staleness=1)
    assert pool.losses["rollout_died"] > 0
    assert len(set(trained_ids(run))) == STEPS * SIZE
