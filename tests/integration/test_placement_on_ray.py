"""Placement groups, and the GPUs that each role sees, on real nodes of Ray."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
from ray_apart import free_port, python, raylet, two_nodes
from waiting import wait_until

from mobula.cluster.errors import PlacementError
from mobula.cluster.runtime.placement import PlacedWorker, PlacementPlan, plan_placement
from mobula.cluster.runtime.placement_groups import cluster_nodes, create_placement_groups, remove_placement_groups
from mobula.configs.load import load_config
from mobula.configs.overrides import groups, own_values


def test_laptop_preset_is_booked_and_given_back(local_ray: str) -> None:
    resources = load_config(["experiment=digits"]).resources
    plan = plan_placement(resources, cluster_nodes(), roles=tuple(resources.roles))

    bookings = create_placement_groups(plan, run_name="test", timeout_s=30)

    assert set(bookings) == {worker.name for worker in plan.workers}
    assert bookings["learner/0"].group.id == bookings["learner/1"].group.id
    assert [bookings[f"learner/{rank}"].bundle_index for rank in (0, 1)] == [0, 1]
    assert bookings["rollout/0"].group.id != bookings["rollout/1"].group.id
    wait_until(lambda: cluster_nodes()[0].num_cpus < 2.0)  # Ray reports what is taken a moment later
    assert cluster_nodes()[0].num_cores == 2
    remove_placement_groups(bookings)
    wait_until_free(2.0)


def test_what_is_taken_meanwhile_is_named_and_nothing_stays_booked(local_ray: str) -> None:
    (node,) = cluster_nodes()

    def worker(role: str) -> PlacedWorker:
        return PlacedWorker(role, 0, node.node_id, num_cpus=1.5, num_gpus=0, num_threads=1, cores=())

    with pytest.raises(PlacementError, match=r"waited 2 s for the cluster to reserve reward/0:.*timeouts\.start_s"):
        create_placement_groups(PlacementPlan((worker("rollout"), worker("reward"))), run_name="test", timeout_s=2)
    wait_until_free(2.0)


def wait_until_free(num_cpus: float) -> None:
    """Ray reports freed resources a moment later; a group that asks for all of them waits for exactly that."""
    (node,) = cluster_nodes()
    everything = PlacedWorker("probe", 0, node.node_id, num_cpus=num_cpus, num_gpus=0, num_threads=1, cores=())
    remove_placement_groups(create_placement_groups(PlacementPlan((everything,)), run_name="probe", timeout_s=20))


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

MORE = {  # words with which a preset starts roles that `experiment=own` does without
    "eight_gpu_critic": ("algorithm=ppo_gae", "algorithm.critic.place=own_ranks"),
    "maye_8": ("resources.learner.num_workers=6", "rewards=unified_judge_pool"),
}


def gpu_presets() -> list[str]:
    """Each under one of its names."""
    found: dict[str, str] = {}
    for preset in groups()["resources"]:
        values = {key: value for key, value in own_values("resources", preset)["resources"].items() if key != "preset"}
        if values.get("device") == "cuda":
            found[json.dumps(values, sort_keys=True)] = preset
    return sorted(found.values())


def gpu_nodes(front: str, back: str, num_cpus: int) -> AbstractContextManager[str]:
    """The address of a cluster of two raylets with the GPUs of these ids. No such GPU has to be there: Ray counts those
    of `--num-gpus`."""

    def node(devices: str, label: str) -> Callable[..., subprocess.Popen[bytes]]:
        return partial(raylet, devices, label, f"--num-gpus={len(devices.split(','))}", f"--num-cpus={num_cpus}")

    return two_nodes(node(front, "front"), node(back, "back"), f"127.0.0.1:{free_port()}")


def placed(address: str, *words: str) -> dict[str, Any]:
    """What `PLACE` finds."""
    _, printed = python("-c", PLACE, address, *words)
    assert "found " in printed, printed
    return json.loads(printed.partition("found ")[2].splitlines()[0])


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of two nodes with eight GPUs each."""
    eight = ",".join(map(str, range(8)))
    with gpu_nodes(eight, eight, num_cpus=64) as found:
        yield found


@pytest.mark.matrix
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("preset", gpu_presets())
def test_every_role_sees_the_gpus_that_it_books(address: str, preset: str) -> None:
    words = (f"resources={preset}", "algorithm.kl.coef=0.01", *MORE.get(preset, ()))
    found = placed(address, "experiment=own", *words)
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


@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_a_role_gets_the_devices_of_the_raylet_whose_label_it_asks_for() -> None:
    words = [
        "experiment=digits", "resources=four_gpu_split", "resources.rollout.num_workers=1",
        "resources.learner.num_gpus=1", "resources.reference.num_workers=1", "resources.reference.num_gpus=1",
        "resources.learner.node_labels={devices: front}", "resources.rollout.node_labels={devices: front}",
        "resources.reference.node_labels={devices: back}",
    ]  # fmt: skip
    with gpu_nodes("0,1,2", "3", num_cpus=8) as address:
        found = placed(address, *words)
    found = {name: found["seen"][name] for name, (num_gpus, _) in found["booked"].items() if num_gpus}
    assert found.pop("reference/0") == "3"
    assert sorted(found) == ["learner/0", "learner/1", "rollout/0"] and sorted(found.values()) == ["0", "1", "2"]
