"""Physical GPUs for a role, as docs/hardware.md pins them: two raylets on one machine, each with GPUs of its own."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_apart import end_all, free_port, num_nodes, python, raylet
from waiting import wait_until

START_S = 240.0
PLACE = """
import json, os, sys
import mobula.deploy.host.ray_defaults
import ray
from mobula.cluster.runtime.placement import plan_placement
from mobula.cluster.runtime.placement_groups import cluster_nodes, create_placement_groups
from mobula.cluster.runtime.ray_actors import spawn
from mobula.configs.load import load_config

class Role:
    def devices(self):
        return os.environ.get("CUDA_VISIBLE_DEVICES")

ray.init(sys.argv[1], log_to_driver=False)
config = load_config(sys.argv[2:])
plan = plan_placement(config.resources, cluster_nodes(), ("learner", "rollout", "reference"))
bookings = create_placement_groups(plan, run_name="pinned", timeout_s=60)
roles = {w.name: spawn(Role, worker=w, booking=bookings[w.name], env={}) for w in plan.workers}
print("found", json.dumps({name: ray.get(role.devices.remote(), timeout=120) for name, role in roles.items()}))
"""
pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]


@pytest.fixture
def address() -> Iterator[str]:
    """Of a cluster whose first raylet has the GPUs 0 to 2 and whose second has GPU 3. No such GPU has to be there: Ray
    counts those of `--num-gpus`."""
    sessions = Path(tempfile.mkdtemp(prefix="mp", dir="/tmp"))  # sockets below it have short names
    found = f"127.0.0.1:{free_port()}"
    port = found.rpartition(":")[2]
    head = [f"--port={port}", f"--temp-dir={sessions}", "--include-dashboard=false"]
    processes = [raylet("0,1,2", "front", "--num-gpus=3", "--num-cpus=8", "--head", *head)]
    try:
        wait_until(lambda: num_nodes(found) == 1, START_S, lambda: "the head")
        processes.append(raylet("3", "back", "--num-gpus=1", "--num-cpus=8", f"--address={found}"))
        wait_until(lambda: num_nodes(found) == 2, START_S, lambda: "two nodes")
        yield found
    finally:
        end_all(processes)
        shutil.rmtree(sessions, ignore_errors=True)


def test_a_role_gets_the_devices_of_the_raylet_whose_label_it_asks_for(address: str) -> None:
    words = [
        "experiment=digits",
        "resources=four_gpu_split",
        "resources.rollout.num_workers=1",
        "resources.learner.num_gpus=1",
        "resources.reference.num_workers=1",
        "resources.reference.num_gpus=1",
        "resources.learner.node_labels={devices: front}",
        "resources.rollout.node_labels={devices: front}",
        "resources.reference.node_labels={devices: back}",
    ]
    printed = python(PLACE, address, *words)
    assert "found " in printed, printed
    found = json.loads(printed.partition("found ")[2].splitlines()[0])
    assert found.pop("reference/0") == "3"
    assert sorted(found) == ["learner/0", "learner/1", "rollout/0"] and sorted(found.values()) == ["0", "1", "2"]
