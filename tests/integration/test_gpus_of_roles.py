"""Every role of every GPU preset sees the GPUs that it books and no others, on nodes that count eight GPUs each."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_apart import end_all, free_port, num_nodes, python, raylet
from waiting import wait_until

from mobula.configs.overrides import groups, own_values

START_S = 240.0
DEVICES = ",".join(map(str, range(8)))
PLACE = """
import json, os, sys
import mobula.deploy.host.ray_defaults
import ray
from mobula.cluster.runtime.placement import needed_roles, plan_placement
from mobula.cluster.runtime.placement_groups import cluster_nodes, create_placement_groups, remove_placement_groups
from mobula.cluster.runtime.ray_actors import kill, spawn, spawn_named
from mobula.configs.load import load_config

class Role:
    def devices(self):
        return os.environ.get("CUDA_VISIBLE_DEVICES")

ray.init(sys.argv[1], log_to_driver=False)
config = load_config(sys.argv[2:], is_complete=False)
plan = plan_placement(config.resources, cluster_nodes(), needed_roles(config))
bookings = create_placement_groups(plan, run_name="seen", timeout_s=120)
roles = {w.name: spawn(Role, worker=w, booking=bookings[w.name], env={}) for w in plan.workers}
named = spawn_named(Role, name="control", env={})
print("found", json.dumps({
    "booked": {w.name: (w.num_gpus, w.node_id) for w in plan.workers},
    "seen": {name: ray.get(role.devices.remote(), timeout=240) for name, role in roles.items()},
    "control": ray.get(named.devices.remote(), timeout=240),
}))
for handle in (*roles.values(), named):
    kill(handle)
remove_placement_groups(bookings)
"""
JUDGE = (
    "{num_workers: 1, num_cpus: 1, num_gpus: 1, num_threads: 1, bind_cores: false, first_core: 0, "
    "custom_resources: {}, node_labels: {}, strategy: auto}"
)
MORE = {  # words with which a preset starts roles that `experiment=own` does without
    "eight_gpu_critic": ("algorithm=ppo_gae", "algorithm.critic.place=own_ranks"),
    "maye_8": ("resources.learner.num_workers=6", "rewards=unified_judge_pool"),
}
pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1800)]


def gpu_presets() -> list[str]:
    """Each under one of its names."""
    found: dict[str, str] = {}
    for preset in groups()["resources"]:
        values = {key: value for key, value in own_values("resources", preset)["resources"].items() if key != "preset"}
        if values.get("device") == "cuda":
            found[json.dumps(values, sort_keys=True)] = preset
    return sorted(found.values())


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of two nodes with eight GPUs each."""
    sessions = Path(tempfile.mkdtemp(prefix="mv", dir="/tmp"))  # sockets below it have short names
    found = f"127.0.0.1:{free_port()}"
    head = [f"--port={found.rpartition(':')[2]}", f"--temp-dir={sessions}", "--include-dashboard=false"]
    means = ("--num-gpus=8", "--num-cpus=64")
    processes = [raylet(DEVICES, "front", *means, "--head", *head)]
    try:
        wait_until(lambda: num_nodes(found) == 1, START_S, lambda: "the head")
        processes.append(raylet(DEVICES, "back", *means, f"--address={found}"))
        wait_until(lambda: num_nodes(found) == 2, START_S, lambda: "two nodes")
        yield found
    finally:
        end_all(processes)
        shutil.rmtree(sessions, ignore_errors=True)


@pytest.mark.parametrize("preset", gpu_presets())
def test_every_role_sees_the_gpus_that_it_books(address: str, preset: str) -> None:
    words = (f"resources={preset}", "algorithm.kl.coef=0.01", *MORE.get(preset, ()))
    printed = python(PLACE, address, "experiment=own", *words)
    assert "found " in printed, printed
    found = json.loads(printed.partition("found ")[2].splitlines()[0])
    booked, seen = found["booked"], found["seen"]
    assert {name for name, (num_gpus, _) in booked.items() if num_gpus}, "no role of the preset books a GPU"
    assert found["control"] == ""
    shares: Counter[tuple[str, str]] = Counter()
    for name, (num_gpus, node) in booked.items():
        devices = [device for device in seen[name].split(",") if device]
        assert len(devices) == (0 if num_gpus == 0 else max(1, round(num_gpus))), f"{name} sees {seen[name]!r}"
        for device in devices:
            shares[node, device] += min(1.0, num_gpus)
    assert max(shares.values()) <= 1.0001, f"a GPU is given to more workers than it holds: {shares}"
