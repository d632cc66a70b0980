"""Every worker starts at its place, with the environment that this cluster needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.placement import NodeResources, PlacedWorker, PlacementPlan, plan_placement
from cluster.placement_groups import Booking
from configs.load import load_config
from configs.schema import RunConfig
from deploy import spawner
from deploy.session import Session
from deploy.spawner import Spawner, engine_environment

NODES = (NodeResources("here", num_cpus=2, num_gpus=0),)


class Role:
    """Something to start."""


def plan(config: RunConfig) -> PlacementPlan:
    return plan_placement(config.resources, NODES, tuple(config.resources.roles))


def started(
    monkeypatch: pytest.MonkeyPatch, config: RunConfig, *, is_local: bool = True, env: dict[str, str] | None = None
) -> dict[str, Any]:
    """What Ray is asked for when the second rollout actor is started."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(spawner, "spawn", lambda role, *args, **options: asked.update(role=role, args=args, **options))
    placed = plan(config)
    bookings = {worker.name: Booking(group=worker.name, bundle_index=0) for worker in placed.workers}
    Spawner(config, Session(NODES, is_local), placed, bookings).start(
        Role, 1, 2, worker=placed.of_role("rollout")[1], env=env, max_concurrency=9, option=3
    )
    return asked


def test_a_worker_starts_in_its_own_booking_with_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = started(monkeypatch, load_config([]))
    assert (asked["role"], asked["args"], asked["option"]) == (Role, (1, 2), 3)
    assert (asked["worker"].name, asked["booking"].group) == ("rollout/1", "rollout/1")
    assert asked["max_concurrency"] == 9


def test_workers_of_a_role_are_those_of_the_plan() -> None:
    config = load_config([])
    placed = plan(config)
    assert Spawner(config, Session(NODES, True), placed, {}).workers("learner") == placed.of_role("learner")


def test_a_private_cluster_stays_on_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    env = started(monkeypatch, load_config([]))["env"]
    assert (env["GLOO_SOCKET_IFNAME"], env["VLLM_HOST_IP"]) == ("lo", "127.0.0.1")
    joined = started(monkeypatch, load_config([]), is_local=False)["env"]
    assert "GLOO_SOCKET_IFNAME" not in joined
    assert "VLLM_HOST_IP" not in joined


def test_nothing_is_reported_to_anybody_and_a_local_model_needs_no_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    local = started(monkeypatch, load_config([f"policy.model={tmp_path}"]))["env"]
    assert (local["VLLM_NO_USAGE_STATS"], local["DO_NOT_TRACK"], local["HF_HUB_OFFLINE"]) == ("1", "1", "1")
    hub = started(monkeypatch, load_config(["policy.model=someone/some-model"]))["env"]
    assert "HF_HUB_OFFLINE" not in hub


def test_what_a_worker_needs_itself_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    env = started(monkeypatch, load_config([]), env={"VLLM_LOGGING_LEVEL": "DEBUG"})["env"]
    assert env["VLLM_LOGGING_LEVEL"] == "DEBUG"


def worker(*cores: int) -> PlacedWorker:
    return PlacedWorker("rollout", 0, "here", 1, 0, 1, cores)


def test_engines_on_one_machine_run_on_different_cores() -> None:
    config = load_config([])
    bindings = [engine_environment(config, w)["VLLM_CPU_OMP_THREADS_BIND"] for w in plan(config).of_role("rollout")]
    assert len(bindings) == len(set(bindings)) == 2


def test_a_cpu_engine_shares_its_process_and_starts_without_warm_up() -> None:
    env = engine_environment(load_config([]), worker(0))
    assert (env["VLLM_ENABLE_V1_MULTIPROCESSING"], env["VLLM_CPU_CI_ENV"]) == ("0", "1")


def test_an_engine_without_cores_of_its_own_is_not_bound() -> None:
    assert "VLLM_CPU_OMP_THREADS_BIND" not in engine_environment(load_config([]), worker())


def test_a_gpu_engine_needs_none_of_it() -> None:
    assert engine_environment(load_config(["resources=gpu_2"]), worker(0)) == {}
