"""Workers start at their places, forked or by themselves; more are asked for only where there is room."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mobula.cluster.errors import PlacementError
from mobula.cluster.runtime import placement
from mobula.cluster.runtime.placement_groups import Booking
from mobula.cluster.workers.status import WorkerState, WorkerStatus
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig, WorkerResources
from mobula.deploy.host.processes import ProcessId
from mobula.deploy.host.run_folder import RunMark
from mobula.deploy.host.session import ALLOCATOR_VARIABLES, ClusterSession, engine_environment, learner_environment
from mobula.deploy.preloading.preloaded import ENGINE, ROLES, Preloaded, preloaded
from mobula.deploy.wiring import spawner
from mobula.deploy.wiring.spawner import Autoscaler, RoomFirst, ScaleFile, Spawner

NODES = (placement.NodeResources("here", num_cpus=2, num_gpus=0),)
MARK = RunMark("digits/1", ProcessId("here", 1, 2))
DIGITS = load_config(["experiment=digits", "name=digits"])


class Role:
    """Something to start."""


def plan(config: RunConfig) -> placement.PlacementPlan:
    return placement.plan_placement(config.resources, NODES, tuple(config.resources.roles))


def started(
    monkeypatch: pytest.MonkeyPatch,
    config: RunConfig = DIGITS,
    *,
    is_local: bool = True,
    env: dict[str, str] | None = None,
    logs: Path | None = None,
    preloaded: Preloaded | None = None,
) -> dict[str, Any]:
    """What Ray is asked for when the second rollout actor is started."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(spawner, "spawn", lambda role, *args, **options: asked.update(role=role, args=args, **options))
    placed = plan(config)
    bookings = {worker.name: Booking(group=worker.name, bundle_index=0) for worker in placed.workers}
    Spawner(config, ClusterSession(NODES, is_local, MARK), placed, bookings, logs, preloaded).start(
        Role, 1, 2, worker=placed.of_role("rollout")[1], env=env, max_concurrency=9, option=3
    )
    return asked


def test_a_worker_starts_in_its_own_booking_with_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = started(monkeypatch)
    assert (asked["role"], asked["args"], asked["option"]) == (Role, (1, 2), 3)
    assert (asked["worker"].name, asked["booking"].group) == ("rollout/1", "rollout/1")
    assert asked["max_concurrency"] == 9


def test_a_worker_has_a_log_in_the_run_folder_if_there_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert started(monkeypatch)["log"] is None
    monkeypatch.chdir(tmp_path)
    log = started(monkeypatch, logs=Path("runs/digits/logs"))["log"]
    assert log == tmp_path / "runs" / "digits" / "logs" / "rollout-1.log", "workers have other working folders"


def test_a_preloaded_worker_is_asked_for_at_the_socket_of_its_role(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started(monkeypatch)["python"] is None
    python = started(monkeypatch, preloaded=Preloaded(Path("/tmp/roles"), Path("/tmp/engines")))["python"]
    assert python.startswith(f"{sys.executable} -I -S ") and python.endswith("worker.py /tmp/engines")


def test_workers_of_a_role_are_those_of_the_plan() -> None:
    assert scaled().workers("learner") == plan(DIGITS).of_role("learner")


@pytest.mark.parametrize(
    ("words", "options", "has", "lacks"),
    [
        pytest.param([], {}, {"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}, [], id="private cluster"),
        pytest.param([], {"is_local": False}, {}, ["GLOO_SOCKET_IFNAME", "VLLM_HOST_IP"], id="joined cluster"),
        pytest.param([], {}, {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}, [], id="no usage is reported"),
        pytest.param(["policy.model={here}"], {}, {"HF_HUB_OFFLINE": "1"}, [], id="a local model needs no hub"),
        pytest.param(["policy.model=someone/some-model"], {}, {}, ["HF_HUB_OFFLINE"], id="a model of the hub"),
        pytest.param([], {"env": {"VLLM_LOGGING_LEVEL": "DEBUG"}}, {"VLLM_LOGGING_LEVEL": "DEBUG"}, [], id="own words"),
        pytest.param([], {}, {"MOBULA_RUN": "digits/1", "MOBULA_DRIVER": "here/1/2"}, [], id="the mark of the run"),
    ],
)
def test_the_environment_of_a_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], options: dict, has: dict, lacks: list[str]
) -> None:
    config = load_config(["experiment=digits", *(word.format(here=tmp_path) for word in words)])
    env = started(monkeypatch, config, **options)["env"]
    assert has.items() <= env.items() and not env.keys() & set(lacks)


class FakeGroups:
    """Stands where placement groups do: one node with `num_cpus`, of which workers that join book a part."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_cpus: float) -> None:
        self.booked: list[str] = []
        self.removed: list[str] = []
        self.requests: list[list[dict[str, float]]] = []
        self._num_cpus = num_cpus
        monkeypatch.setattr(spawner, "book_more", self._book)
        monkeypatch.setattr(spawner, "remove_placement_groups", lambda bookings: self.removed.extend(bookings))
        monkeypatch.setattr(spawner, "cluster_nodes", lambda: (placement.NodeResources("here", num_cpus, 0),))
        monkeypatch.setattr(spawner.Autoscaler, "ask", lambda autoscaler, bundles: self._ask(bundles))

    def _book(
        self, workers: WorkerResources, number: int, *, name: str, timeout_s: float
    ) -> list[tuple[Booking, placement.NodeResources]]:
        self.booked.append(name)
        return [(Booking(name, n), placement.NodeResources("here", self._num_cpus, 0)) for n in range(number)]

    def _ask(self, bundles: list[dict[str, float]]) -> str:
        self.requests.append(bundles)
        return "The autoscaler has been asked"


def scaled() -> Spawner:
    placed = plan(DIGITS)
    bookings = {worker.name: Booking(worker.name, 0) for worker in placed.workers}
    return Spawner(DIGITS, ClusterSession(NODES, True, MARK), placed, bookings)


def test_a_worker_of_the_plan_keeps_its_place_and_one_that_joins_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, joining = FakeGroups(monkeypatch, 4), scaled()
    assert joining.book("rollout", 1) == plan(DIGITS).of_role("rollout")[1]
    third = joining.book("rollout", 2)
    assert (third.name, third.cores, groups.booked) == ("rollout/2", (2,), ["digits/rollout/2"])
    assert joining.book("rollout", 2) is third and len(groups.booked) == 1
    joining.release("rollout", 2)
    joining.release("rollout", 2)
    assert groups.removed == ["rollout/2"]


def test_a_worker_whose_node_is_gone_gets_another_place(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, joining = FakeGroups(monkeypatch, 4), scaled()
    monkeypatch.setattr(spawner, "cluster_nodes", lambda: (placement.NodeResources("there", 4, 0),))
    monkeypatch.setattr(spawner, "book_more", book_there)
    moved = joining.book("rollout", 1)
    assert (moved.node_id, groups.removed) == ("there", ["rollout/1"])
    assert joining.book("rollout", 1) is moved


def book_there(workers: WorkerResources, number: int, **rest: Any) -> list[tuple[Booking, placement.NodeResources]]:
    return [(Booking("new", n), placement.NodeResources("there", 4, 0)) for n in range(number)]


def test_learner_ranks_stay_together_and_all_move_when_one_has_lost_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, joining = FakeGroups(monkeypatch, 4), scaled()
    assert joining.book_together("learner") == plan(DIGITS).of_role("learner")
    monkeypatch.setattr(spawner, "cluster_nodes", lambda: (placement.NodeResources("there", 4, 0),))

    def no_room(workers: WorkerResources, number: int, **rest: Any) -> None:
        raise PlacementError("something else took it")

    monkeypatch.setattr(spawner, "book_more", no_room)
    with pytest.raises(PlacementError):
        joining.book_together("learner")
    assert groups.removed == ["learner/0", "learner/1"]
    monkeypatch.setattr(spawner, "book_more", book_there)
    moved = joining.book_together("learner")
    places = [(rank.name, rank.node_id, rank.cores) for rank in moved]
    assert places == [("learner/0", "there", (0,)), ("learner/1", "there", (1,))]
    assert joining.book_together("learner") == moved


def test_a_worker_that_cannot_be_bound_leaves_no_booking(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, joining = FakeGroups(monkeypatch, 0), scaled()
    with pytest.raises(PlacementError, match="resources.rollout.num_threads"):
        joining.book("rollout", 2)
    assert groups.removed == ["rollout/2"]


def test_without_room_the_autoscaler_is_asked_for_what_a_run_holds_and_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, joining = FakeGroups(monkeypatch, 0.15), scaled()
    joining.check_room("reward", 1)
    assert groups.requests == []
    with pytest.raises(PlacementError, match="2 more reward workers .* 1 would: .* The autoscaler has been asked"):
        joining.check_room("reward", 2)
    [asked] = groups.requests
    assert len(asked) == len(plan(DIGITS).workers) + 2
    assert asked[-2:] == [{"CPU": 0.1}] * 2


def test_closing_gives_every_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, joining = FakeGroups(monkeypatch, 4), scaled()
    joining.book("reward", 1)
    joining.close()
    assert sorted(groups.removed) == sorted([*(w.name for w in plan(DIGITS).workers), "reward/1"])


def worker(*cores: int) -> placement.PlacedWorker:
    return placement.PlacedWorker("rollout", 0, "here", 1, 0, 1, cores)


def test_the_environment_of_an_engine_on_cpu() -> None:
    bindings = [engine_environment(DIGITS, w)["VLLM_CPU_OMP_THREADS_BIND"] for w in plan(DIGITS).of_role("rollout")]
    assert len(bindings) == len(set(bindings)) == 2, "engines on one machine run on different cores"
    env = engine_environment(DIGITS, worker(0))
    assert (env["VLLM_ENABLE_V1_MULTIPROCESSING"], env["VLLM_CPU_CI_ENV"]) == ("0", "1"), "one process, no warm-up"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in engine_environment(DIGITS, worker()), "it has no cores of its own"
    assert engine_environment(load_config(["experiment=digits", "resources=two_gpu"]), worker(0)) == {}


STEPS = """
import resource, threading
import numpy as np

def num_faults():
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

def steps():
    for step in range(8):
        if step == 4:
            before = num_faults()
        buffers = [np.ones(1 << 20) for _ in range(5)]
        del buffers
    print(num_faults() - before)

thread = threading.Thread(target=steps)
thread.start()
thread.join()
"""


def num_page_faults(env: dict[str, str]) -> int:
    """Of four steps that each take and free 40 MiB, on a thread that has done four of them before."""
    ran = subprocess.run([sys.executable, "-c", STEPS], env=env, capture_output=True, text=True, timeout=60, check=True)
    return int(ran.stdout)


def test_a_worker_on_cpu_keeps_the_memory_that_a_step_frees(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    own = started(monkeypatch)["env"]
    of_malloc = {name: value for name, value in own.items() if name.startswith("MALLOC_")}
    assert num_page_faults(plain) > 4000
    assert num_page_faults(plain | of_malloc) < 100


def test_a_worker_on_a_gpu_has_the_usual_malloc() -> None:
    env = spawner._environment(
        load_config(["experiment=digits", "resources=two_gpu"]), ClusterSession(NODES, True, MARK)
    )
    assert not [name for name in env if name.startswith("MALLOC_")]


def test_ranks_that_train_on_gpus_have_segments_that_grow_and_engines_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's sleep mode keeps memory in pools of its own, which torch cannot have with such segments."""
    config = load_config(["experiment=digits", "resources=one_gpu_colocated"])
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    settings = learner_environment(config)["PYTORCH_ALLOC_CONF"]
    assert "expandable_segments:True" in settings.split(",")
    torch._C._accelerator_setAllocatorSettings(settings)  # torch refuses names that it does not have
    assert engine_environment(config, worker(0)) == {}
    assert learner_environment(DIGITS) == {}
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    assert learner_environment(config) == {}, "the user's settings stay"


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
    ("states", "wanted", "missing"),
    [([SERVING], 3, 2), ([SERVING, DRAINING], 3, 2), ([SERVING, SERVING], 2, 0), ([SERVING, SERVING], 1, 0)],
)
async def test_room_is_looked_for_only_for_those_that_are_missing(
    states: list[WorkerState], wanted: int, missing: int
) -> None:
    role, room = FakeRole(*states), Room(5)
    await RoomFirst("reward", role, room.check).scale(wanted)
    assert (room.asked, role.asked) == ([("reward", missing)] if missing else [], [wanted])


async def test_without_room_the_role_is_not_asked() -> None:
    role = FakeRole(SERVING)
    with pytest.raises(PlacementError, match="no room"):
        await RoomFirst("reward", role, Room(1).check).scale(3)
    assert role.asked == []


def test_room_counts_on_every_node_and_names_what_is_free() -> None:
    resources = DIGITS.resources  # a reward worker takes 0.1 CPUs
    nodes = [placement.NodeResources("a", 0.25, 0), placement.NodeResources("b", 0.1, 0)]
    placement.check_room(resources, "reward", 3, nodes)
    with pytest.raises(PlacementError, match=r"4 more reward workers with 0.1 CPUs .*3 would: a has 0.25 .*b has 0.1"):
        placement.check_room(resources, "reward", 4, nodes)
    with pytest.raises(PlacementError, match="there is no node"):
        placement.check_room(resources, "reward", 1, [])


def test_a_worker_that_joins_is_bound_to_cores_behind_those_of_its_role() -> None:
    resources = DIGITS.resources
    node = placement.NodeResources("a", 4, 0)
    assert placement.place_at(resources, "rollout", 2, node, seat=2).cores == (2,)
    joined = placement.place_at(resources, "reward", 5, node, seat=1)
    assert (joined.name, joined.node_id, joined.num_cpus, joined.cores) == ("reward/5", "a", 0.1, ())


def requests(monkeypatch: pytest.MonkeyPatch, labels: dict[str, str]) -> list[list[dict[str, float]]]:
    """What the autoscaler of a cluster whose second node has these labels is asked for."""
    asked: list[list[dict[str, float]]] = []
    nodes = [{"Alive": True, "Labels": {}}, {"Alive": True, "Labels": labels}]
    monkeypatch.setattr(spawner, "ray", SimpleNamespace(nodes=lambda: nodes))
    monkeypatch.setattr(spawner, "request_resources", lambda bundles: asked.append(bundles))
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
    before = DIGITS.resources  # two engines, one reward worker
    assert ScaleFile(tmp_path, before).earlier() == {}
    for role, num_workers in (("rollout", 4), ("reward", 3), ("reference", 2), ("reference", 1)):
        ScaleFile(tmp_path, before).note(role, num_workers)
    assert ScaleFile(tmp_path, before).earlier() == {"rollout": 4, "reward": 3}
    changed = load_config(["experiment=digits", "resources.rollout.num_workers=1"]).resources
    assert ScaleFile(tmp_path, changed).earlier() == {"reward": 3}


SCRIPT = """
import json, os, random, signal, sys
path, before = sys.path[0], set(sys.modules)
import numpy, ray, torch
print(json.dumps({
    "arguments": sys.argv[1:], "path": path, "folder": os.getcwd(), "mode": os.environ["MODE"], "input": input(),
    "threads": torch.get_num_threads(), "draws": [random.random(), float(numpy.random.rand())],
    "children": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL, "names": sorted(os.environ),
    "modules": [name for name in before if name.startswith("mobula.")], "has_ray": "ray._raylet" in before,
    "leads_group": os.getpgrp() == os.getpid(),
    "loaded_with": open(f"/proc/{os.getppid()}/environ").read().split("\\0"),
}))
print("an error", file=sys.stderr)
"""


def run_script(command: str, script: Path, folder: Path, *, threads: int = 1) -> dict[str, Any]:
    """Runs the script as Ray runs a worker, until its output is closed."""
    env = {**os.environ, "MODE": "worker", "OMP_NUM_THREADS": str(threads)}
    call = [*shlex.split(command), str(script), "--port", "1 2"]
    done = subprocess.run(call, input="text\n", capture_output=True, text=True, env=env, cwd=folder, check=True)
    assert "an error" in done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_workers_are_forked_with_their_modules_and_have_everything_else_of_their_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with preloaded(DIGITS) as workers:
        role = run_script(workers.python("learner"), script, tmp_path)
        engines = [run_script(workers.python("rollout"), script, tmp_path, threads=2) for _ in range(2)]
        alone = run_script(shlex.quote(sys.executable), script, tmp_path)
    for seen in (role, *engines, alone):
        assert (seen["arguments"], seen["path"], seen["folder"]) == (["--port", "1 2"], str(tmp_path), str(tmp_path))
        assert (seen["mode"], seen["input"], seen["children"], seen["has_ray"]) == ("worker", "text", True, False)
    assert set(ROLES) <= set(role["modules"]) and ENGINE not in role["modules"] and alone["modules"] == []
    assert all({*ROLES, ENGINE} <= set(engine["modules"]) for engine in engines)
    assert all(seen["leads_group"] for seen in (role, *engines)), "Ray ends the group of a worker with the worker"
    assert (role["threads"], engines[0]["threads"]) == (1, 2)
    for seen in (role, *engines):
        assert "OMP_WAIT_POLICY=PASSIVE" in seen["loaded_with"], "OpenMP reads it when torch is imported"
    assert all(a != b for a, b in zip(engines[0]["draws"], engines[1]["draws"], strict=True))
    assert set(role["names"]) <= set(alone["names"])
    assert not workers.roles.parent.exists()


def test_without_a_server_a_worker_imports_by_itself(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    missing = Preloaded(tmp_path / "none", tmp_path / "none")
    seen = run_script(missing.python("learner"), script, tmp_path)
    assert (seen["arguments"], seen["input"], seen["modules"]) == (["--port", "1 2"], "text", [])


@pytest.mark.parametrize("words", [["resources=two_gpu"], ["resources.address=10.0.0.1:6379"]])
def test_workers_on_gpus_and_on_other_machines_import_by_themselves(words: list[str]) -> None:
    with preloaded(load_config(["experiment=digits", *words])) as workers:
        assert workers is None
