"""Placement: what fits is placed without overbooking anything, what does not fit is refused by name."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mobula.cluster.errors import PlacementError
from mobula.cluster.runtime.placement import (
    NodeResources,
    PlacementPlan,
    check_room,
    needed_roles,
    plan_placement,
    plan_table,
    training_roles,
)
from mobula.cluster.runtime.placement_groups import bundle_of
from mobula.configs.load import load_config
from mobula.configs.schema import ResourcesConfig, WorkerResources
from mobula.configs.schema.resources import RolloutResources

ALL_ROLES = ("learner", "rollout", "reference", "reward")
LAPTOP = NodeResources("laptop", num_cpus=2, num_gpus=0)


def resources(*overrides: str) -> ResourcesConfig:
    return load_config(["experiment=digits", *overrides]).resources


def workers(num_workers: int, num_cpus: float, num_gpus: float = 0, **changes: Any) -> RolloutResources:
    least = {"num_threads": 1, "bind_cores": False, "first_core": 0, "custom_resources": {}, "node_labels": {}}
    least |= {"strategy": "auto", "tensor_parallel": 1}
    return RolloutResources(num_workers=num_workers, num_cpus=num_cpus, num_gpus=num_gpus, **{**least, **changes})


def nodes_of(plan: PlacementPlan, role: str) -> list[str]:
    return [worker.node_id for worker in plan.of_role(role)]


def test_bound_workers_of_one_role_have_their_own_cores_and_roles_take_turns_on_them() -> None:
    plan = plan_placement(resources(), [LAPTOP], ALL_ROLES)
    assert [worker.cores for worker in plan.of_role("learner")] == [(0,), (1,)]
    assert [worker.cores for worker in plan.of_role("rollout")] == [(0,), (1,)]
    assert plan.of_role("reference")[0].cores == ()
    names = [worker.name for worker in plan.workers]
    assert names == ["learner/0", "learner/1", "rollout/0", "rollout/1", "reference/0", "reward/0"]


def test_roles_that_work_at_the_same_time_get_different_cores() -> None:
    plan = plan_placement(resources("resources=laptop_overlapped", "learner=single"), [LAPTOP], ALL_ROLES)
    cores = {worker.name: worker.cores for worker in plan.workers if worker.cores}
    assert cores == {"rollout/0": (0,), "learner/0": (1,)}


def test_cores_are_counted_node_by_node_and_start_again_beyond_the_last() -> None:
    three = resources("resources.rollout.num_workers=3", "resources.rollout.num_cpus=0.1")
    plan = plan_placement(three, [LAPTOP], ("rollout",))
    assert [worker.cores for worker in plan.of_role("rollout")] == [(0,), (1,), (0,)]
    two_nodes = [NodeResources("a", 1, 0), NodeResources("b", 1, 0)]
    plan = plan_placement(resources("resources.rollout.num_cpus=1"), two_nodes, ("rollout",))
    assert [worker.cores for worker in plan.of_role("rollout")] == [(0,), (0,)]
    assert sorted(nodes_of(plan, "rollout")) == ["a", "b"]


def test_workers_are_bound_to_all_cores_of_a_node_whatever_else_holds_a_share_of_them() -> None:
    node = NodeResources("a", num_cpus=1.4, num_gpus=0, all_cpus=2)
    plan = plan_placement(resources(), [node], ("rollout",))
    assert [worker.cores for worker in plan.of_role("rollout")] == [(0,), (1,)]


def test_threads_take_consecutive_cores() -> None:
    four = resources("resources.rollout.num_threads=2")
    plan = plan_placement(four, [NodeResources("a", 4, 0)], ("rollout",))
    assert [worker.cores for worker in plan.of_role("rollout")] == [(0, 1), (2, 3)]


def test_more_threads_than_cores_are_refused() -> None:
    with pytest.raises(PlacementError, match=r"resources\.rollout\.num_threads=8.*2 cores.*num_threads=2"):
        plan_placement(resources("resources.rollout.num_threads=8"), [LAPTOP], ALL_ROLES)


@pytest.mark.parametrize(
    ("overrides", "node", "message"),
    [
        (["resources.rollout.num_workers=9"], LAPTOP, r"resources\.rollout asks for 9 workers.*0\.3 CPUs.*CPUs and"),
        (["resources=two_gpu"], LAPTOP, r"resources\.learner.*0\.7 GPUs.*0 GPUs free.*smaller than resources=two_gpu"),
        (
            ["resources=eight_gpu_split"],
            NodeResources("a", 64, 7),
            r"resources\.rollout.*fits nowhere|resources\.reference",
        ),
        (["resources.learner.num_cpus=4"], LAPTOP, r"worker 0 fits nowhere: laptop has 2 CPUs and 0 GPUs free"),
    ],
)
def test_what_does_not_fit_names_role_request_and_what_is_free(
    overrides: list[str], node: NodeResources, message: str
) -> None:
    with pytest.raises(PlacementError, match=message):
        plan_placement(resources(*overrides), [node], ALL_ROLES)


def test_cluster_without_nodes_is_refused() -> None:
    with pytest.raises(PlacementError, match="there is no node"):
        plan_placement(resources(), [], ALL_ROLES)


def test_role_that_is_not_needed_is_not_placed() -> None:
    config = load_config(["experiment=digits", "algorithm.kl.coef=0"])
    plan = plan_placement(config.resources, [LAPTOP], needed_roles(config))
    assert plan.of_role("reference") == ()
    assert "reference" in needed_roles(load_config(["experiment=digits"]))


def test_a_replay_needs_the_ranks_that_train() -> None:
    assert training_roles(load_config(["experiment=digits", "algorithm=ppo_gae"])) == ("learner",)
    own_ranks = ["algorithm.critic.place=own_ranks", "resources.critic.num_workers=1"]
    apart = load_config(["experiment=digits", "algorithm=ppo_gae", *own_ranks])
    assert training_roles(apart) == ("learner", "critic")


@pytest.mark.parametrize(("sizes", "chosen"), [((3, 4, 3), [1, 1, 1, 1]), ((3, 3), [0, 0, 0, 1])])
def test_learner_ranks_stay_together_where_a_node_holds_them_all(sizes: tuple[int, ...], chosen: list[int]) -> None:
    config = resources("resources.learner.num_cpus=1", "resources.learner.num_workers=4")
    nodes = [NodeResources(str(index), num_cpus, 0) for index, num_cpus in enumerate(sizes)]
    assert sorted(nodes_of(plan_placement(config, nodes, ALL_ROLES), "learner")) == list(map(str, chosen))


def test_cpu_workers_leave_gpu_nodes_alone_while_others_have_room() -> None:
    nodes = [NodeResources("gpus", 32, 2), NodeResources("cpus", 4, 0)]
    plan = plan_placement(resources("resources=two_gpu"), nodes, ALL_ROLES)
    assert nodes_of(plan, "reward") == ["cpus"]
    assert nodes_of(plan, "rollout") + nodes_of(plan, "learner") == ["gpus", "gpus"]


def test_share_of_a_gpu_lies_on_one_gpu() -> None:
    config = resources("resources=two_gpu").model_copy(update={"rollout": workers(3, 1, 0.6)})
    with pytest.raises(PlacementError, match=r"resources\.rollout.*worker 2 fits nowhere"):
        plan_placement(config, [NodeResources("a", 32, 2)], ("rollout",))


def test_table_sums_each_role_by_node() -> None:
    rows = {row.role: row for row in plan_table(plan_placement(resources(), [LAPTOP], ALL_ROLES))}
    assert list(rows) == list(ALL_ROLES)
    assert (rows["rollout"].num_workers, rows["rollout"].num_cpus) == (2, pytest.approx(0.6))
    assert rows["rollout"].cores == ((0,), (1,))


worker_counts = st.builds(
    workers,
    num_workers=st.integers(0, 5),
    num_cpus=st.sampled_from([0.1, 0.3, 0.5, 1, 2]),
    num_gpus=st.sampled_from([0, 0.3, 0.5, 1, 2]),
)
clusters = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), min_size=1, max_size=4)


@given(cluster=clusters, learner=worker_counts, rollout=worker_counts, reward=worker_counts)
def test_plan_places_every_worker_once_and_overbooks_no_node(
    cluster: list[tuple[int, int]], learner: WorkerResources, rollout: WorkerResources, reward: WorkerResources
) -> None:
    asked = {"learner": learner, "rollout": rollout, "reward": reward}
    nodes = [NodeResources(f"n{index}", cpus, gpus) for index, (cpus, gpus) in enumerate(cluster)]
    try:
        plan = plan_placement(BASE.model_copy(update=asked), nodes, tuple(asked))
    except PlacementError:
        return  # refusals are tested by name above
    used: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for worker in plan.workers:
        used[worker.node_id][0] += worker.num_cpus
        used[worker.node_id][1] += worker.num_gpus
    assert {role: len(plan.of_role(role)) for role in asked} == {role: a.num_workers for role, a in asked.items()}
    for node in nodes:
        num_cpus, num_gpus = used[node.node_id]
        assert num_cpus <= node.num_cpus + 1e-5 and num_gpus <= node.num_gpus + 1e-5


BASE = resources()

LABELLED = [
    NodeResources("a", 16, 2, labels=(("zone", "a"), ("disk", "ssd"))),
    NodeResources("b", 64, 2, custom=(("licence", 2.0),), labels=(("zone", "b"),)),
    NodeResources("c", 64, 0, custom=(("licence", 1.0),), labels=(("zone", "b"),)),
]


def placed_on(reward: WorkerResources, nodes: list[NodeResources] = LABELLED) -> list[str]:
    plan = plan_placement(BASE.model_copy(update={"reward": reward}), nodes, ("reward",))
    return nodes_of(plan, "reward")


def test_a_role_gets_only_nodes_with_all_of_its_labels() -> None:
    assert placed_on(workers(2, 1, node_labels={"zone": "a"})) == ["a", "a"]
    assert set(placed_on(workers(3, 1, node_labels={"zone": "b"}))) <= {"b", "c"}
    with pytest.raises(PlacementError, match="With the labels zone=b, disk=ssd there is no node"):
        placed_on(workers(1, 1, node_labels={"zone": "b", "disk": "ssd"}))
    with pytest.raises(PlacementError, match="With the labels zone=a there is a"):
        placed_on(workers(17, 1, node_labels={"zone": "a"}))


def test_custom_resources_are_counted_like_any_other() -> None:
    assert sorted(placed_on(workers(3, 1, custom_resources={"licence": 1.0}))) == ["b", "b", "c"]
    with pytest.raises(PlacementError, match="0 GPUs, licence=1.0 each, and worker 3 fits nowhere.* 0 licence free"):
        placed_on(workers(4, 1, custom_resources={"licence": 1.0}))
    with pytest.raises(PlacementError, match="1 more reward workers"):
        check_room(
            BASE.model_copy(update={"reward": workers(1, 1, custom_resources={"seat": 1.0})}), "reward", 1, LABELLED
        )
    assert bundle_of(workers(1, 2, custom_resources={"licence": 1.0})) == {"CPU": 2, "licence": 1.0}


def test_a_role_is_packed_or_spread_as_it_is_asked_to() -> None:
    alike = [NodeResources(name, 8, 0) for name in "abc"]
    assert len(set(placed_on(workers(3, 1, strategy="pack"), alike))) == 1
    assert len(set(placed_on(workers(3, 1, strategy="spread"), alike))) == 3
    uneven = [NodeResources("small", 4, 0), NodeResources("large", 64, 0)]
    assert sorted(placed_on(workers(4, 1, strategy="spread"), uneven)) == ["large", "large", "small", "small"]
    assert placed_on(workers(4, 1), uneven) == ["large"] * 4
    packed_learner = plan_placement(BASE.model_copy(update={"learner": workers(3, 1)}), alike, ("learner",))
    assert len(set(nodes_of(packed_learner, "learner"))) == 1
    spread = BASE.model_copy(update={"learner": workers(3, 1, strategy="spread")})
    assert len(set(nodes_of(plan_placement(spread, alike, ("learner",)), "learner"))) == 3


def test_an_engine_over_several_gpus_lies_on_one_node_and_takes_whole_gpus() -> None:
    words = ("resources=eight_gpu_split", "resources.rollout.tensor_parallel=2", "resources.rollout.num_gpus=2")
    config = resources(*words, "resources.rollout.num_workers=2")
    plan = plan_placement(config, [NodeResources("a", 96, 3), NodeResources("b", 96, 3)], ("rollout",))
    engines = plan.of_role("rollout")
    assert all(len(engine.gpus) == 2 for engine in engines)
    assert {engine.node_id for engine in engines} == {"a", "b"}, "the third GPU of a node is no half of an engine"
    with pytest.raises(PlacementError, match=r"resources\.rollout.*2 GPUs each, and worker 0 fits nowhere"):
        plan_placement(config, [NodeResources("a", 96, 1), NodeResources("b", 96, 1)], ("rollout",))


def test_an_engine_over_two_gpus_beside_shares_is_refused_on_a_node_of_two_and_placed_on_one_of_three() -> None:
    """Ray would leave it pending: 1.1 GPUs of two are free, and only one of them is whole."""
    engine = ("resources=two_gpu", "resources.rollout.tensor_parallel=2", "resources.rollout.num_gpus=2")
    asked = resources(*engine, "resources.learner.num_gpus=0.6", "resources.reference.num_gpus=0.3")
    with pytest.raises(PlacementError) as caught:
        plan_placement(asked, [NodeResources("two", num_cpus=8, num_gpus=2)], ALL_ROLES)
    message = str(caught.value)
    assert "resources.rollout asks for 1 workers with 1 CPUs and 2 GPUs each" in message
    assert "1.4 GPUs (1 of them whole) free" in message
    assert "lower resources.rollout.num_workers, num_cpus or num_gpus (resources.rollout.tensor_parallel" in message
    plan = plan_placement(asked, [NodeResources("three", num_cpus=8, num_gpus=3)], ALL_ROLES)
    gpus = {worker.name: worker.gpus for worker in plan.workers}
    assert set(gpus["rollout/0"]).isdisjoint({*gpus["learner/0"], *gpus["reference/0"]})
    assert gpus["learner/0"] == gpus["reference/0"] and len(gpus["rollout/0"]) == 2
