"""Placement groups on a real one-node Ray cluster: booked where planned, refused by deadline, given back."""

from __future__ import annotations

import pytest
from waiting import wait_until

from mobula.cluster.errors import PlacementError
from mobula.cluster.runtime.placement import PlacedWorker, PlacementPlan, plan_placement
from mobula.cluster.runtime.placement_groups import cluster_nodes, create_placement_groups, remove_placement_groups
from mobula.configs.load import load_config


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
