"""The rollout pool picks engines that can serve, replaces lost ones, and grows and shrinks while it is used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from fakes import SETTINGS, make_group, make_prompt
from waiting import until

from mobula.cluster.errors import (
    DeadlineError,
    EngineDiedError,
    ExcludedPromptError,
    LostReplyError,
    RestartLoopError,
    RolloutError,
    WorkerDiedError,
)
from mobula.cluster.failures import Failure
from mobula.cluster.records.trajectory import Generated
from mobula.cluster.rollout.rollout_pool import HealthChecks, RolloutPool
from mobula.cluster.workers.status import RestartBudget, RestartPolicy, WorkerState

PROMPT = make_prompt("0/0/s0")
POLICY = RestartPolicy(max_restarts=2, window_s=1000, backoff_s=0.001, max_backoff_s=0.01)
HEALTH = HealthChecks(interval_s=0.001, probe_interval_s=0.0, max_failures_in_a_row=2, no_worker_s=5)
PATIENT = HealthChecks(interval_s=0.001, probe_interval_s=1000, max_failures_in_a_row=2, no_worker_s=5)

CAUSE = Failure("RuntimeError: no offset", ("model.py:7 in step",), "Traceback ...", "RuntimeError|model.py:7")


class FakeEngine:
    """One process: `dies`, `fails`, `is_silent` and `loses_replies` set how it answers from now on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dies = False
        self.fails = False
        self.is_silent = False
        self.loses_replies = False
        self.is_open = True
        self.num_probes = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.start_error: Exception | None = None
        self.poison: str | None = None  # the prompt of which its core dies
        self.died_of: EngineDiedError | None = None
        self.has_died = asyncio.Event()

    async def start(self) -> None:
        if self.start_error:
            raise self.start_error

    def die_of(self, failure: Failure) -> None:
        self.died_of = EngineDiedError(f"{self.name}'s engine failed", failure)
        self.has_died.set()

    async def generate(self, prompt, settings):
        if prompt.prompt_id == self.poison:
            await asyncio.sleep(0)  # others come meanwhile
            self.die_of(CAUSE)
        waits = [asyncio.ensure_future(event.wait()) for event in (self.gate, self.has_died)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if self.died_of is not None:
            raise self.died_of
        if self.fails:
            raise RolloutError("no output")
        self._answer()
        if self.is_silent or self.loses_replies:
            raise DeadlineError(f"waited 1 s for {self.name} to generate prompt {prompt.prompt_id}")
        group = make_group(prompt)
        return Generated(group, group.summary())

    async def is_alive(self) -> None:
        self._answer()

    async def probe(self) -> None:
        self.num_probes += 1
        self._answer()
        if self.is_silent:
            raise DeadlineError(f"waited 1 s for {self.name} to sample one token")

    async def weight_version(self) -> int:
        return -1

    async def close(self) -> None:
        self.is_open = False

    def _answer(self) -> None:
        if self.dies:
            raise WorkerDiedError(f"{self.name} died")


class Yard:
    """Makes engines, and remembers them by seat."""

    def __init__(self, prepare: Callable[[FakeEngine, int], None] = lambda engine, nth: None) -> None:
        self.made: dict[int, list[FakeEngine]] = {}
        self.released: list[int] = []
        self._prepare = prepare

    async def spawn(self, index: int) -> FakeEngine:
        engine = FakeEngine(f"rollout/{index}")
        made = self.made.setdefault(index, [])
        self._prepare(engine, len(made))
        made.append(engine)
        return engine

    async def release(self, index: int) -> None:
        self.released.append(index)

    def now(self, index: int) -> FakeEngine:
        return self.made[index][-1]


@asynccontextmanager
async def pool_of(
    num: int, yard: Yard, *, health: HealthChecks = HEALTH, version: int = 3, policy: RestartPolicy = POLICY
) -> AsyncIterator[tuple[RolloutPool, list[str]]]:
    losses: list[str] = []
    pool = RolloutPool(
        yard.spawn, num, release=yard.release, policy=policy, health=health, on_lost=losses.append,
        on_excluded=lambda prompt, error: losses.append(f"excluded {prompt.prompt_id}"),
    )  # fmt: skip

    async def admit(engine: FakeEngine) -> int:
        return version

    pool.admit_with(admit)
    await pool.start()
    for engine in pool.receivers():
        pool.synced(engine, version)
    pool.published(version)
    async with pool.tended():
        yield pool, losses
    await pool.close()


def states(pool: RolloutPool) -> list[WorkerState]:
    return [worker.state for worker in pool.status()]


async def test_prompts_go_to_the_engine_with_the_fewest_in_flight() -> None:
    yard = Yard()
    async with pool_of(2, yard) as (pool, _):
        for index in range(2):
            yard.now(index).gate.clear()
        calls = [asyncio.create_task(pool.generate(make_prompt(f"0/{n}/s"), SETTINGS)) for n in range(4)]
        await asyncio.sleep(0)
        assert [worker.num_in_flight for worker in pool.status()] == [2, 2]
        for index in range(2):
            yard.now(index).gate.set()
        await asyncio.gather(*calls)
        assert [worker.num_in_flight for worker in pool.status()] == [0, 0]


async def test_an_engine_that_died_is_left_at_once_and_comes_back_at_the_current_version() -> None:
    yard = Yard()
    async with pool_of(2, yard) as (pool, losses):
        first = yard.now(0)
        first.dies = True
        with pytest.raises(WorkerDiedError):
            await pool.generate(PROMPT, SETTINGS)
        assert WorkerState.SERVING in states(pool), "the other one serves on"
        await pool.generate(PROMPT, SETTINGS)
        await until(lambda: states(pool) == [WorkerState.SERVING] * 2)
        assert not first.is_open
        [back, _] = pool.status()
        assert (back.version, back.num_restarts) == (3, 1)
        assert losses == ["rollout_died"]


@pytest.mark.parametrize(("fault", "kind"), [("dies", "rollout_died"), ("is_silent", "rollout_hung")])
async def test_the_watch_finds_an_idle_engine_that_died_or_samples_nothing(fault: str, kind: str) -> None:
    yard = Yard()
    async with pool_of(1, yard) as (pool, losses):
        setattr(yard.now(0), fault, True)
        await until(lambda: len(yard.made[0]) == 2)
        await until(lambda: states(pool) == [WorkerState.SERVING])
        assert losses == [kind]


@pytest.mark.parametrize(("error", "kind"), [(DeadlineError, "rollout_hung"), (WorkerDiedError, "rollout_died")])
async def test_an_engine_that_misses_a_deadline_and_a_probe_is_lost(error: type[Exception], kind: str) -> None:
    async def probe() -> None:
        raise error("asked for one token")

    yard = Yard()
    async with pool_of(1, yard, health=PATIENT) as (pool, losses):
        yard.now(0).loses_replies, yard.now(0).probe = True, probe
        with pytest.raises(DeadlineError):
            await pool.generate(PROMPT, SETTINGS)
        assert losses == [kind]


async def test_an_engine_that_loses_a_reply_is_well() -> None:
    yard = Yard()
    async with pool_of(1, yard, health=PATIENT) as (pool, losses):
        engine = yard.now(0)
        engine.loses_replies = True
        message = "waited 1 s for rollout/0 to generate prompt 0/0/s0: the worker is healthy, .* timeouts.rollout_s"
        with pytest.raises(LostReplyError, match=message):
            await pool.generate(PROMPT, SETTINGS)
        engine.loses_replies = False
        await pool.generate(PROMPT, SETTINGS)
        assert losses == [] and engine.is_open


@pytest.mark.parametrize(
    ("fault", "error", "kind"),
    [("fails", RolloutError, "rollout_failing"), ("loses_replies", LostReplyError, "rollout_lost_replies")],
)
async def test_an_engine_that_fails_or_loses_replies_is_replaced(fault: str, error: type[Exception], kind: str) -> None:
    yard = Yard()
    async with pool_of(1, yard, health=PATIENT) as (pool, losses):
        setattr(yard.now(0), fault, True)
        for _ in range(PATIENT.max_failures_in_a_row):
            with pytest.raises(error):
                await pool.generate(PROMPT, SETTINGS)
        assert losses == [kind]
        await pool.generate(PROMPT, SETTINGS)  # waits for the one that takes its place


async def test_a_busy_engine_is_not_probed() -> None:
    yard = Yard()
    async with pool_of(1, yard, health=PATIENT) as (pool, _):
        await pool.generate(PROMPT, SETTINGS)
        await asyncio.sleep(0.02)
        assert yard.now(0).num_probes == 0


async def test_one_failure_between_successes_costs_nothing() -> None:
    yard = Yard()
    async with pool_of(1, yard) as (pool, losses):
        for _ in range(3):
            yard.now(0).fails = True
            with pytest.raises(RolloutError):
                await pool.generate(PROMPT, SETTINGS)
            yard.now(0).fails = False
            await pool.generate(PROMPT, SETTINGS)
        assert losses == []


async def test_an_engine_behind_the_published_version_is_not_sampled_from() -> None:
    yard = Yard()
    async with pool_of(2, yard) as (pool, _):
        behind, ahead = pool.receivers()
        pool.synced(ahead, 4)
        pool.published(4)
        yard.now(1).gate.clear()
        calls = [asyncio.create_task(pool.generate(PROMPT, SETTINGS)) for _ in range(3)]
        await asyncio.sleep(0)
        assert [worker.num_in_flight for worker in pool.status()] == [0, 3]
        yard.now(1).gate.set()
        await asyncio.gather(*calls)
        pool.synced(behind, 4)
        await pool.generate(PROMPT, SETTINGS)


async def test_of_a_long_error_the_status_holds_one_line_and_the_log_all(caplog: pytest.LogCaptureFixture) -> None:
    ids = [f"\tactor_id: {number}" for number in range(30)]
    last = "The actor is dead because its worker process has died. " + "Worker exit detail: end of file. " * 9
    error = WorkerDiedError("\n".join(["its actor died while waiting for a group", *ids, last]))
    async with pool_of(1, Yard()) as (pool, _):
        pool.lose(pool.receivers()[0], error)
        [worker] = pool.status()
    start = "died: its actor died while waiting for a group ... The actor is dead because its worker process has died."
    assert worker.detail.startswith(start) and worker.detail.endswith("...")
    assert len(worker.detail) < 200 and len(worker.detail.splitlines()) == 1
    assert "actor_id: 29" in caplog.text


async def test_the_run_ends_when_no_actor_is_left() -> None:
    def broken(engine: FakeEngine, nth: int) -> None:
        if nth > 0:
            engine.start_error = WorkerDiedError("no such device")

    yard = Yard(broken)
    with pytest.raises(WorkerDiedError, match=r"max_restarts=2 within .*rollout/0: died: no such device.*resume=auto"):
        async with asyncio.timeout(5), pool_of(1, yard) as (pool, _):
            pool.lose(pool.receivers()[0], WorkerDiedError("gone"))
            await asyncio.Event().wait()
    assert len(yard.made[0]) == 3 and not any(engine.is_open for engine in yard.made[0])


async def test_a_prompt_does_not_wait_for_ever() -> None:
    hasty = HealthChecks(interval_s=0.001, probe_interval_s=0, max_failures_in_a_row=2, no_worker_s=0.01)
    async with pool_of(1, Yard(), health=hasty) as (pool, _):
        pool.published(9)
        with pytest.raises(DeadlineError, match=r"prompt 0/0/s0 waited 0.01 s for a rollout actor: rollout/0 serving"):
            await pool.generate(PROMPT, SETTINGS)


@pytest.mark.parametrize("moment", ["announced", "published"])
async def test_who_joins_while_a_push_is_under_way_or_done_has_its_version(moment: str) -> None:
    """The push goes to the receivers of its begin: an older joiner would keep prompts waiting that need its version."""
    yard, versions = Yard(), [3, 3, 4]
    async with pool_of(1, yard) as (pool, _):

        async def admit(engine: FakeEngine) -> int:
            getattr(pool, moment)(4)
            return versions.pop(0)

        pool.admit_with(admit)
        await pool.scale(2)
        await until(lambda: states(pool) == [WorkerState.SERVING] * 2)
        assert [worker.version for worker in pool.status()] == [3, 4]
        assert versions == []


async def test_an_engine_that_is_scaled_away_while_it_loads_is_no_loss(caplog: pytest.LogCaptureFixture) -> None:
    class Loading(FakeEngine):
        async def start(self) -> None:
            while self.is_open:
                await asyncio.sleep(0.001)
            raise WorkerDiedError("its actor died: it was killed by ray.kill")

    class Slow(Yard):
        async def spawn(self, index: int) -> FakeEngine:
            engine = await super().spawn(index)
            if index == 1:
                self.made[1][-1] = engine = Loading(engine.name)
            return engine

    yard = Slow()
    async with pool_of(1, yard) as (pool, losses):
        await pool.scale(2)
        await until(lambda: 1 in yard.made)
        await pool.scale(1)
        await until(lambda: yard.released == [1])
        await asyncio.sleep(0.02)
        assert losses == [] and len(yard.made[1]) == 1 and not yard.now(1).is_open
        assert states(pool) == [WorkerState.SERVING]
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


async def test_an_engine_that_is_scaled_away_while_its_process_is_made_is_ended() -> None:
    made = asyncio.Event()

    class Late(Yard):
        async def spawn(self, index: int) -> FakeEngine:
            if index == 1:
                await made.wait()
            engine = await super().spawn(index)
            engine.start_error = WorkerDiedError("its place is gone") if index == 1 else None
            return engine

    yard = Late()
    async with pool_of(1, yard) as (pool, losses):
        await pool.scale(2)
        await asyncio.sleep(0)
        await pool.scale(1)
        await until(lambda: yard.released == [1])
        made.set()
        await until(lambda: 1 in yard.made and not yard.now(1).is_open)
        assert losses == [] and len(yard.made[1]) == 1


def test_each_restart_waits_twice_as_long_up_to_a_limit_and_old_ones_are_forgotten() -> None:
    budget = RestartBudget(RestartPolicy(max_restarts=4, window_s=100, backoff_s=2, max_backoff_s=10))
    assert [budget.take(now) for now in (0, 1, 2, 3, 4)] == [2, 4, 8, 10, None]
    assert budget.take(101) == 8, "those at 0 and 1 no longer count"
    assert budget.num_restarts == 5


async def retried(pool: RolloutPool, prompt_id: str) -> str:
    """What becomes of a prompt that is asked for until it is there or refused."""
    while True:
        try:
            await pool.generate(make_prompt(prompt_id), SETTINGS)
        except EngineDiedError:
            continue
        except ExcludedPromptError:
            return "excluded"
        return "done"


async def test_a_death_with_many_prompts_in_flight_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    yard = Yard()
    async with pool_of(1, yard, health=PATIENT) as (pool, losses):
        yard.now(0).gate.clear()
        calls = [asyncio.create_task(pool.generate(make_prompt(f"0/{n}/s{n}"), SETTINGS)) for n in range(64)]
        await until(lambda: pool.status()[0].num_in_flight == 64)
        yard.now(0).die_of(CAUSE)
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(error, EngineDiedError) and error.failure == CAUSE for error in ended)
        [line] = [message for message in caplog.messages if "is lost" in message]
        cause = "RuntimeError: no offset at model.py:7 in step"
        assert line.splitlines()[0] == f"rollout/0 is lost (died): {cause}; prompts in flight that are retried: 64"
        assert pool.status()[0].detail == f"died: {cause}"
        assert losses == ["rollout_died"]


@pytest.mark.parametrize("num_engines", [1, 2])
async def test_a_prompt_that_ends_one_engine_after_the_other_is_excluded_and_all_others_are_sampled(
    num_engines: int, caplog: pytest.LogCaptureFixture
) -> None:
    def poisoned(engine: FakeEngine, nth: int) -> None:
        engine.poison = "0/7/s7"

    lenient = RestartPolicy(max_restarts=5, window_s=1000, backoff_s=0.001, max_backoff_s=0.01)
    async with pool_of(num_engines, Yard(poisoned), health=PATIENT, policy=lenient) as (pool, losses):
        async with asyncio.timeout(5):
            ended = await asyncio.gather(*(retried(pool, f"0/{n}/s{n}") for n in range(16)))
        assert [n for n, end in enumerate(ended) if end == "excluded"] == [7]
        assert set(losses[:-1]) == {"rollout_died"} and losses[-1] == "excluded 0/7/s7"
        assert len(losses) - 1 <= 4, "deaths"
        assert caplog.text.count("prompt 0/7/s7 (sample s7) is excluded") == 1
        assert await retried(pool, "1/3/s7") == "excluded", "in the next epoch too"
        assert await retried(pool, "test/3/s7") == "done", "a held-out prompt of that name is another one"


async def test_engines_that_die_of_one_cause_after_every_push_end_the_run_before_the_budget_does() -> None:
    lenient = RestartPolicy(max_restarts=50, window_s=1000, backoff_s=0.001, max_backoff_s=0.01)
    yard = Yard()
    message = r"3 engines in a row died within 10 weight pushes .*RuntimeError: no offset"
    with pytest.raises(RestartLoopError, match=message):
        async with asyncio.timeout(5), pool_of(1, yard, health=PATIENT, policy=lenient) as (pool, _):
            for n in range(50):
                await pool.generate(make_prompt(f"0/{n}/s{n}"), SETTINGS)
                pool.announced(3)
                yard.now(0).die_of(CAUSE)
                with pytest.raises(EngineDiedError):
                    await pool.generate(make_prompt(f"0/{n + 100}/s"), SETTINGS)
    assert len(yard.made[0]) == 3


async def test_engines_that_are_killed_from_outside_are_restarted_as_often_as_the_budget_allows() -> None:
    lenient = RestartPolicy(max_restarts=20, window_s=1000, backoff_s=0.0001, max_backoff_s=0.001)
    yard = Yard()
    async with pool_of(1, yard, health=PATIENT, policy=lenient) as (pool, losses):
        async with asyncio.timeout(5):
            for _ in range(20):
                await until(lambda: states(pool) == [WorkerState.SERVING])
                pool.announced(3)
                yard.now(0).die_of(Failure.of_exit(-9, "the engine's process 7"))
                with pytest.raises(EngineDiedError):
                    await pool.generate(PROMPT, SETTINGS)
            await pool.generate(PROMPT, SETTINGS)
        assert losses == ["rollout_died"] * 20
