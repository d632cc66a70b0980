"""More workers are asked for only where there is room; what is missing is asked of the autoscaler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mobula.cluster.errors import PlacementError
from mobula.cluster.runtime.placement import NodeResources, check_room, place_at
from mobula.cluster.workers.status import WorkerState, WorkerStatus
from mobula.configs.load import load_config
from mobula.deploy.wiring import spawner as autoscaling
from mobula.deploy.wiring.spawner import Autoscaler, RoomFirst, ScaleFile

SERVING, DRAINING = WorkerState.SERVING, WorkerState.DRAINING


class FakeRole:
    def __init__(self, *states: WorkerState) -> None:
        self.asked: list[int] = []
        self._states = states

    def status(self) -> list[WorkerStatus]:
        return [WorkerStatus(f"reward/{i}", state, None, 0, 0) for i, state in enumerate(self._states)]

    async def scale(self, num_workers: int) -> None:
        self.asked.append(num_workers)


class Room:
    """For `num_free` more workers."""

    def __init__(self, num_free: int) -> None:
        self.asked: list[tuple[str, int]] = []
        self._num_free = num_free

    def check(self, role: str, num_more: int) -> None:
        self.asked.append((role, num_more))
        if num_more > self._num_free:
            raise PlacementError("no room")


@pytest.mark.parametrize(
    ("states", "wanted", "asked_for"),
    [
        ([SERVING], 3, [("reward", 2)]),
        ([SERVING, DRAINING], 3, [("reward", 2)]),
        ([SERVING, SERVING], 2, []),
        ([SERVING, SERVING], 1, []),
    ],
)
async def test_room_is_looked_for_only_for_those_that_are_missing(
    states: list[WorkerState], wanted: int, asked_for: list[tuple[str, int]]
) -> None:
    role, room = FakeRole(*states), Room(5)
    await RoomFirst("reward", role, room.check).scale(wanted)
    assert (room.asked, role.asked) == (asked_for, [wanted])


async def test_without_room_the_role_is_not_asked() -> None:
    role = FakeRole(SERVING)
    with pytest.raises(PlacementError, match="no room"):
        await RoomFirst("reward", role, Room(1).check).scale(3)
    assert role.asked == []


def test_room_counts_on_every_node_and_names_what_is_free() -> None:
    resources = load_config(["experiment=digits"]).resources  # a reward worker takes 0.1 CPUs
    nodes = [NodeResources("a", 0.25, 0), NodeResources("b", 0.1, 0)]
    check_room(resources, "reward", 3, nodes)
    with pytest.raises(PlacementError, match=r"4 more reward workers with 0.1 CPUs .*3 would: a has 0.25 .*b has 0.1"):
        check_room(resources, "reward", 4, nodes)
    with pytest.raises(PlacementError, match="there is no node"):
        check_room(resources, "reward", 1, [])


def test_a_worker_that_joins_is_bound_to_cores_behind_those_of_its_role() -> None:
    resources = load_config(["experiment=digits"]).resources
    node = NodeResources("a", 4, 0)
    assert place_at(resources, "rollout", 2, node, seat=2).cores == (2,)
    joined = place_at(resources, "reward", 5, node, seat=1)
    assert (joined.name, joined.node_id, joined.num_cpus, joined.cores) == ("reward/5", "a", 0.1, ())


class FakeRay:
    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Labels": {}}, {"Alive": True, "Labels": self._labels}]


def requests(monkeypatch: pytest.MonkeyPatch, labels: dict[str, str]) -> list[list[dict[str, float]]]:
    """What the autoscaler of a cluster whose second node has these labels is asked for."""
    asked: list[list[dict[str, float]]] = []
    monkeypatch.setattr(autoscaling, "ray", FakeRay(labels))
    monkeypatch.setattr(autoscaling, "request_resources", lambda bundles: asked.append(bundles))
    return asked


def test_an_autoscaler_is_asked_for_all_that_the_run_is_to_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = requests(monkeypatch, {"ray.io/node-group": "workers"})
    autoscaler = Autoscaler()
    assert "has been asked" in autoscaler.ask([{"CPU": 1}, {"CPU": 2, "GPU": 1}])
    assert asked == [[{"CPU": 1}, {"CPU": 2, "GPU": 1}]]
    autoscaler.withdraw()
    autoscaler.withdraw()
    assert asked[1:] == [[]], "a request stands until it is withdrawn, once"


def test_a_cluster_without_an_autoscaler_is_reported_to_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = requests(monkeypatch, {"ray.io/node-id": "b"})
    autoscaler = Autoscaler()
    assert "has no autoscaler" in autoscaler.ask([{"CPU": 1}])
    autoscaler.withdraw()
    assert asked == []


def test_a_scale_goes_on_after_a_resume_unless_another_number_was_configured(tmp_path: Path) -> None:
    before = load_config(["experiment=digits"]).resources  # two engines, one reward worker
    assert ScaleFile(tmp_path, before).earlier() == {}
    for role, num_workers in (("rollout", 4), ("reward", 3), ("reference", 2), ("reference", 1)):
        ScaleFile(tmp_path, before).note(role, num_workers)
    assert ScaleFile(tmp_path, before).earlier() == {"rollout": 4, "reward": 3}
    changed = load_config(["experiment=digits", "resources.rollout.num_workers=1"]).resources
    assert ScaleFile(tmp_path, changed).earlier() == {"reward": 3}
