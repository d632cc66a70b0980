"""The reward pool over real actors: a killed worker, and functions that hang, raise or return NaN, lose nothing and are
counted by name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import ray
from reward_data import answers, component, pool_over, rewards_of
from waiting import until

from mobula.cluster.runtime.ray_actors import answer
from mobula.cluster.workers.status import RestartPolicy
from mobula.rewards.pool.worker import RewardWorker

PLUGIN = """
import time

def score(request):
    if request.response.text == "hang":
        time.sleep(1000)
    if request.response.text == "raise":
        raise KeyError("a bug")
    time.sleep(0.05)
    return float(request.response.text)
"""

REWARDS = rewards_of(component("mine", "slow_plugin:score", 2.0))


@pytest.fixture
def plugin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "slow_plugin.py").write_text(PLUGIN)
    return tmp_path


def spawn_worker(plugin_folder: Path) -> Any:
    environment = {"PYTHONPATH": str(plugin_folder), "OMP_NUM_THREADS": "1"}
    actor = ray.remote(RewardWorker).options(num_cpus=0.5, runtime_env={"env_vars": environment})
    return actor.remote(
        REWARDS,
        "reward",
        object_timeout_s=10,
        start_timeout_s=60,
        function_timeout_s=2,
        group_timeout_s=60,
        device="cpu",
        dtype="float32",
    )


async def test_a_killed_worker_and_functions_that_fail_in_any_way_lose_nothing(
    local_ray: str, plugin_folder: Path
) -> None:
    class Hosts:
        async def start(self, index: int) -> Any:
            return spawn_worker(plugin_folder)

        async def stop(self, index: int, handle: Any) -> None:
            ray.kill(handle)

        async def release(self, index: int) -> None: ...

    workers = [spawn_worker(plugin_folder) for _ in range(2)]
    await asyncio.gather(*(answer(w.ping.remote(), timeout_s=60, what="a worker to start") for w in workers))
    pool = pool_over(
        REWARDS,
        workers,
        hosts=Hosts(),
        restarts=RestartPolicy(max_restarts=3, window_s=600, backoff_s=0, max_backoff_s=0),
        start_s=60,
        alive_s=60,
        timeout_s=120,
        max_in_flight=2,
    )
    service = pool.services["reward"]
    bad = {3: "raise", 5: "hang", 8: "nan"}
    texts = [(str(i), bad.get(i, str(i + 0.5))) for i in range(12)]
    references = [ray.put(answers(f"0/{i}", *pair)) for i, pair in enumerate(texts)]
    tasks = [asyncio.create_task(pool.score(reference, f"0/{i}")) for i, reference in enumerate(references)]
    await tasks[0]
    ray.kill(workers[1])
    rewards = await asyncio.gather(*tasks)

    expected = [[None if t in bad.values() else 2 * float(t) for t in pair] for pair in texts]
    assert [[r and r.value for r in pair] for pair in rewards] == expected
    assert +pool.failures == {"worker_died": 1, "timed_out": 1, "failed": 1, "not_finite": 1}
    await until(lambda: len(service.workers) == 2)  # the one that replaces it may still start
    assert service.workers[0] is workers[0] and service.workers[1] is not workers[1]
    await pool.close()
