"""Control panel and scaling on a real cluster: reward workers come and go under load, and nothing is lost."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import ray
from fakes import stop_request
from reward_data import answers
from waiting import until

from mobula.cluster.errors import RunOverError
from mobula.cluster.roles import ReplayStats
from mobula.cluster.rollout.in_flight import InFlightRequests
from mobula.cluster.runtime.placement import plan_placement
from mobula.cluster.runtime.placement_groups import cluster_nodes, create_placement_groups
from mobula.cluster.runtime.ray_actors import LOGS_FOLDER, spawn_named
from mobula.cluster.workers.control import ControlLoop, ControlPanel
from mobula.cluster.workers.status import Progress, RoleOutcome, RunStatus, ScaleRequest, WorkerState, WorkerStatus
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.host.run_folder import RECORD_FILE, marking, recorded
from mobula.deploy.host.session import ClusterSession, run_record
from mobula.deploy.run.run_client import RunAddress, find_run, read_status, scale
from mobula.deploy.wiring import spawner as scaling
from mobula.deploy.wiring.persistence import RunContext
from mobula.deploy.wiring.roles import reward_pool
from mobula.deploy.wiring.spawner import Spawner, control_loop
from mobula.rewards.pool.reward_pool import RewardPool

PLUGIN = """
import time

def score(request, **options):
    time.sleep(0.02)
    return float(request.response.text)
"""
ASK_S = 60.0


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """One reward worker, on a tenth of a core."""
    (tmp_path / "scaling_plugin.py").write_text(PLUGIN)
    words = ["experiment=digits", "name=scaled", f"folder={tmp_path}", "timeouts.start_s=120"]
    return load_config([*words, "rewards.components.0.function=scaling_plugin:score"])


class Parts:
    """What a run has of scalable roles: here the reward pool alone."""

    def __init__(self, config: RunConfig, namespace: str, session: ClusterSession, spawner: Spawner) -> None:
        self.config = config
        self.session = session
        self.spawner = spawner
        self.rewards: RewardPool = reward_pool(config, spawner)
        self.address = RunAddress("scaled", run_record(config, session).address, namespace)
        self.losses: list[str] = []

    def control(self) -> ControlLoop:
        roles, metrics = {"reward": self.rewards.services["reward"].pool}, FakeMetrics(self.losses)
        run = RunContext(self.config, metrics, stop_request())
        return control_loop(run, self.spawner, roles, InFlightRequests(64), FakeReplay(), lambda: ())

    async def status(self) -> RunStatus:
        return await asyncio.to_thread(read_status, self.address, ASK_S)

    async def scale(self, **wanted: int) -> tuple[RoleOutcome, ...]:
        return await asyncio.to_thread(scale, self.address, wanted, ASK_S)


class FakeReplay:
    async def stats(self) -> ReplayStats:
        return ReplayStats(1, 2, 3, 0.5, {"uniform": 4}, "0/7/s7")


class FakeMetrics:
    def __init__(self, losses: list[str]) -> None:
        self._losses = losses

    def progress(self) -> Progress:
        return Progress(3, "update", 1.0)

    def count(self, name: str, reason: str) -> None:
        self._losses.append(reason)

    def post(self, status: RunStatus) -> None: ...


@asynccontextmanager
async def parts(config: RunConfig, namespace: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Parts]:
    with marking(config.name) as mark:
        session = ClusterSession(cluster_nodes(), True, mark)
        plan = plan_placement(config.resources, session.nodes, ("reward",))
        bookings = await asyncio.to_thread(create_placement_groups, plan, run_name=config.name, timeout_s=60)
        spawner = Spawner(config, session, plan, bookings, config.run_folder / LOGS_FOLDER)
        monkeypatch.setattr(spawner, "_env", {**spawner._env, "PYTHONPATH": str(config.folder)})
        found = Parts(config, namespace, session, spawner)
        try:
            yield found
        finally:
            await found.rewards.close()
            await asyncio.to_thread(spawner.close)


class Load:
    """Groups in flight until it is stopped; `scored` holds index -> value of those that came back."""

    def __init__(self, rewards: RewardPool, num_at_a_time: int) -> None:
        self.scored: dict[int, float] = {}
        self._indices = count()
        self._is_over = False
        self._tasks = [asyncio.create_task(self._send(rewards)) for _ in range(num_at_a_time)]

    async def stop(self) -> int:
        """How many were sent; all of them are back."""
        self._is_over = True
        await asyncio.gather(*self._tasks)
        return next(self._indices)

    async def _send(self, rewards: RewardPool) -> None:
        while not self._is_over:
            index = next(self._indices)
            (reward,) = await rewards.score(ray.put(answers(f"0/{index}", str(index))), f"0/{index}")
            assert index not in self.scored
            self.scored[index] = reward.value


def states(workers: tuple[WorkerStatus, ...] | list[WorkerStatus]) -> dict[str, WorkerState]:
    return {worker.name: worker.state for worker in workers}


async def test_reward_workers_come_and_go_under_load_and_every_group_is_scored_once(
    local_ray: str, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with parts(config, local_ray, monkeypatch) as run, run.control().running():
        load = Load(run.rewards, num_at_a_time=24)
        await until(lambda: load.scored)
        assert await run.scale(reward=3) == (RoleOutcome("reward", 3, ""),)
        pool = run.rewards.services["reward"].pool
        await until(lambda: list(states(pool.status()).values()) == [WorkerState.SERVING] * 3)
        await until(lambda: all(worker.num_in_flight for worker in run.rewards.services["reward"].pool.status()))
        all_serving = {f"reward/{i}": WorkerState.SERVING for i in range(3)}
        async with asyncio.timeout(ASK_S):  # what is asked for was posted a while ago
            while states((await run.status()).workers) != all_serving:
                pass
        assert (config.run_folder / LOGS_FOLDER / "reward-2.log").read_text().startswith("===== process ")
        await run.rewards.check()
        for worker in run.rewards.services["reward"].pool.status():
            assert (worker.vitals.rss_bytes or 0) > 10 * 2**20
        stores = (await run.status()).object_store
        assert stores.total_bytes > 2**20
        ray.kill(run.rewards.services["reward"].workers[2])
        await until(lambda: run.rewards.failures["worker_died"])
        assert await run.scale(reward=1) == (RoleOutcome("reward", 1, ""),)
        await until(lambda: list(states(run.rewards.services["reward"].pool.status())) == ["reward/0"])
        num_sent = await load.stop()

        assert load.scored == {index: float(index) for index in range(num_sent)}
        assert +run.rewards.failures == {"worker_died": 1}
        await until(lambda: _num_groups_of("scaled/reward") == 1)
    assert run.losses == []
    await until(lambda: _num_groups_of("scaled/reward") == 0)


async def test_what_does_not_fit_is_refused_with_what_is_free(
    local_ray: str, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with parts(config, local_ray, monkeypatch) as run, run.control().running():
        (refused, unknown) = await run.scale(reward=400, learner=3)
    assert "399 more reward workers with 0.1 CPUs and 0 GPUs each do not fit" in refused.refusal
    assert "CPUs and 0 GPUs free" in refused.refusal
    assert "no autoscaler" in refused.refusal
    assert "no scalable role learner" in unknown.refusal


async def test_the_status_is_found_by_the_run_folder_and_what_is_asked_for_survives_the_death_of_the_panel(
    local_ray: str, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.run_folder.mkdir(exist_ok=True)
    died = config.folder / "died"

    class Dying(ControlPanel):
        """Ends when the driver comes for the first request."""

        def exchange(self, *args: Any) -> list[ScaleRequest]:
            if self._requests and not died.exists():
                died.touch()
                os._exit(1)
            return super().exchange(*args)

    monkeypatch.setattr(scaling, "ControlPanel", Dying)
    async with parts(config, local_ray, monkeypatch) as run:
        with recorded(run_record(config, run.session)):
            async with run.control().running():
                first = await asyncio.to_thread(read_status, find_run(None, config.run_folder, None), ASK_S)
                assert (first.run, first.progress.phase, first.total_steps) == ("scaled", "update", config.num_steps)
                assert first.replay == await FakeReplay().stats()
                assert await run.scale(reward=1) == (RoleOutcome("reward", 1, ""),)
                assert died.exists() and run.losses
                second = await run.status()
            assert second.num_panels_lost >= 1 and second.posted_at > first.posted_at
            started = time.monotonic()
            with pytest.raises(RunOverError, match="run scaled is over: the cluster at .* has no run of this name"):
                await run.status()
            assert time.monotonic() - started < ASK_S
        assert not (config.run_folder / RECORD_FILE).exists()


def test_a_named_actor_is_one_of_its_name(local_ray: str) -> None:
    class Empty:
        pass

    first = spawn_named(Empty, name="only", env={})
    with pytest.raises(ValueError, match="already taken"):
        spawn_named(Empty, name="only", env={})
    ray.kill(first)


def _num_groups_of(prefix: str) -> int:
    table = ray.util.placement_group_table()
    return sum(row["name"].startswith(prefix) and row["state"] == "CREATED" for row in table.values())
