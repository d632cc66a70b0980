"""The fault matrix: a process dies, hangs or is slow at any moment, and the run trains what it would have trained.

Each run takes several faults, one or two at a time, each at an exact moment (`sabotage`). Its final state holds the ids
of all groups in the order in which they were trained; at staleness 0 it must be the state of the run without faults.

The run of the suite meets every victim at every moment, every victim with every kind of fault, and every moment with
every kind. All cells of the product, one at a time: `python -m pytest tests/integration/test_faults.py -m matrix`;
those of an engine's core are in `test_engine_faults.py`.
Ray's memory monitor is a fault of its own: it chooses moment and victims itself. `soak.py` is run in short.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import pytest
import ray
from sabotage import NONE, Saboteur, is_running
from small_cluster import PROMPTS_PER_STEP, STEPS_PER_ROUND, Shape, SmallRun
from soak import soak
from waiting import until, wait_until

from mobula.cluster.recovery.checkpoints import newest_learner_state
from mobula.cluster.workers.faults import FAULTS_FILE, read_faults

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]

HERE = Path(__file__).resolve().parent
VICTIMS = ("rollout/0", "reward/0", "reference/0", "learner/0", "learner/1")
MOMENTS = ("generating", "scoring", "in_reference", "in_update", "in_broadcast", "in_checkpoint")
KILL, HANG, SLOW = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT
KINDS = (KILL, HANG, SLOW)
OF_TWO_NODES = [("scoring", "in_broadcast"), ("generating", "in_update"), ("in_reference", "in_checkpoint")]
DEADLINES_S = 12.0  # longer than any deadline of a call in a small run
GONE_S = 30.0
BACK_S = 240.0
LOST_WITH_NODES = {"rollout": 2, "reference": 1, "learner": 1}


@dataclass(frozen=True)
class Fault:
    moment: str
    victim: str
    kind: signal.Signals

    def __str__(self) -> str:
        return f"{self.moment} {self.victim} {int(self.kind)}"


def expected(num_steps: int) -> list[list[str]]:
    """The steps of a run in which nothing ever failed, at staleness 0."""
    ids = [f"0/{n}/s{n}" for n in range(num_steps * PROMPTS_PER_STEP)]
    return [ids[i : i + PROMPTS_PER_STEP] for i in range(0, len(ids), PROMPTS_PER_STEP)]


def assert_costs_nothing_but_time(folder: Path, rounds: Sequence[Sequence[Fault]]) -> SmallRun:
    """A run to which the faults happen, one round after the other, is like one to which none did."""
    planned = iter(rounds)

    async def plan_next(version: int) -> None:
        """The next round waits until every role is back: the run goes on meanwhile with those that are left."""
        if version % STEPS_PER_ROUND == 1:
            for faults in planned:
                await until(lambda: run.is_whole, BACK_S)
                for fault in faults:
                    run.saboteur.plan(fault.moment, victim=fault.victim, signal=fault.kind)
                break

    num_steps = STEPS_PER_ROUND * len(rounds) + 2
    run = SmallRun(folder, Shape(total_steps=num_steps), on_version=plan_next)
    assert asyncio.run(run.go()) == num_steps
    struck = iter(run.saboteur.struck)
    assert [sorted(islice(struck, len(faults))) for faults in rounds] == [sorted(map(str, faults)) for faults in rounds]
    assert next(struck, None) is None
    assert [sorted(step) for step in run.trained] == [sorted(step) for step in expected(num_steps)]
    wait_until(lambda: not left(folder), GONE_S, lambda: left(folder))
    assert_no_placement_group_is_left()
    return run


def left(folder: Path) -> list[str]:
    """Roles of the run whose process is still there: Ray ends them a moment after the call."""
    return [file.name for file in folder.glob("pid-*") if is_running(int(file.read_text()))]


def assert_no_placement_group_is_left() -> None:
    assert [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"] == []


def covering(victims: Sequence[str]) -> list[Fault]:
    """Every victim at every moment; the kinds go round so that each meets every victim and every moment."""
    return [
        Fault(moment, victim, KINDS[(m + VICTIMS.index(victim)) % len(KINDS)])
        for m, moment in enumerate(MOMENTS)
        for victim in victims
    ]


def test_a_failure_of_any_role_at_any_moment_costs_nothing_but_time(tmp_path: Path, local_ray: str) -> None:
    """Two at a time where it can be, at different moments: an interchangeable worker, and a learner rank."""
    workers, ranks = covering(VICTIMS[:3]), covering(VICTIMS[3:])
    half = len(ranks) // 2
    rounds = list(zip_longest(workers, ranks[half:] + ranks[:half]))
    rounds = [[fault for fault in faults if fault is not None] for faults in rounds]
    assert all(len({fault.moment for fault in faults}) == len(faults) for faults in rounds)
    run = assert_costs_nothing_but_time(tmp_path, rounds)
    for victim in VICTIMS:
        role = victim.partition("/")[0]
        assert any(kind.startswith(f"{role}_") for kind in run.losses), run.losses


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS, ids=["kill", "hang", "slow"])
@pytest.mark.parametrize("victim", VICTIMS)
def test_every_cell_of_the_matrix(victim: str, kind: signal.Signals, tmp_path: Path, local_ray: str) -> None:
    assert_costs_nothing_but_time(tmp_path, [[Fault(moment, victim, kind)] for moment in MOMENTS])


@pytest.mark.matrix  # Ray's memory monitor has to wait until every role is there
def test_workers_that_rays_memory_monitor_ends_cost_nothing_but_time(tmp_path: Path) -> None:
    """It ends every worker at once, both learner ranks among them, on a node of its own with a tiny threshold."""
    subprocess.run([sys.executable, str(HERE / "small_memory.py"), str(tmp_path)], cwd=HERE.parents[1], check=True)
    result = json.loads((tmp_path / "result.json").read_text())
    assert [sorted(step) for step in result["trained"]] == [sorted(step) for step in expected(result["version"])]
    causes = {fault.worker: fault.cause for fault in read_faults(tmp_path / FAULTS_FILE)}
    assert {"the learner", "rollout/0", "rollout/1"} <= causes.keys()
    settings = {"the learner": "learner.tokens_per_microbatch", "rollout/0": "sampler.vllm.kv_cache_bytes"}
    for worker, setting in settings.items():
        assert re.search(r"Ray ended its process \d+, which used [\d.]+ GB, because its node is out of", causes[worker])
        assert setting in causes[worker]


@pytest.mark.parametrize(
    "moments",
    [
        pytest.param(("generating", "in_update", "in_checkpoint")),
        pytest.param(("scoring", "in_reference", "in_broadcast"), marks=pytest.mark.matrix),
    ],
    ids="-".join,
)
def test_a_driver_killed_often_goes_on_where_it_was(moments: Sequence[str], tmp_path: Path, local_ray: str) -> None:
    """Its journal and its checkpoints are all that is left of it; at the last start it is stopped for a while."""
    num_steps = STEPS_PER_ROUND * (len(moments) + 1)
    began = []
    for moment in moments:
        assert drive(tmp_path, num_steps, (moment, KILL)) == -KILL
        wait_until(lambda: not left(tmp_path), GONE_S, lambda: left(tmp_path))
        began.append(newest_learner_state(tmp_path / "checkpoints")[0])
    assert drive(tmp_path, num_steps, ("in_update", SLOW)) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["began"] >= max(began) > 0
    assert result["recovered"]["steps"] == result["began"] - began[-1]
    assert_driven(tmp_path, num_steps, [*((moment, KILL) for moment in moments), ("in_update", SLOW)])


@pytest.mark.matrix
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_driver_that_hangs_is_killed_and_goes_on_where_it_was(moment: str, tmp_path: Path, local_ray: str) -> None:
    """The test does both, as the user would: no process watches a driver."""
    num_steps = 10
    with driving(tmp_path, num_steps, (moment, HANG)) as driver:
        wait_until(lambda: Saboteur(tmp_path).struck, BACK_S, lambda: moment)
        time.sleep(DEADLINES_S)
        assert driver.poll() is None
        driver.kill()
        assert driver.wait() == -KILL
    wait_until(lambda: not left(tmp_path), GONE_S, lambda: left(tmp_path))
    assert drive(tmp_path, num_steps) == 0
    assert_driven(tmp_path, num_steps, [(moment, HANG)])


@pytest.mark.matrix
def test_a_driver_that_is_slow_at_any_moment_costs_nothing_but_time(tmp_path: Path, local_ray: str) -> None:
    num_steps = STEPS_PER_ROUND * (len(MOMENTS) + 1)
    faults = [(moment, SLOW) for moment in MOMENTS]
    assert drive(tmp_path, num_steps, *faults) == 0
    assert_driven(tmp_path, num_steps, faults)


def assert_driven(folder: Path, num_steps: int, faults: Sequence[tuple[str, signal.Signals]]) -> None:
    """All of these happened to the driver, and the run is as one to which nothing did."""
    assert json.loads((folder / "result.json").read_text())["version"] == num_steps
    assert Saboteur(folder).struck == [f"{moment} driver {int(kind)}" for moment, kind in faults]
    run = SmallRun(folder, Shape(total_steps=num_steps))
    assert [sorted(step) for step in run.trained] == [sorted(step) for step in expected(num_steps)]
    wait_until(lambda: not left(folder), GONE_S, lambda: left(folder))
    assert_no_placement_group_is_left()


def drive(folder: Path, num_steps: int, *faults: tuple[str, signal.Signals]) -> int:
    """The exit code of a driver that these happen to, one after the other."""
    with driving(folder, num_steps, *faults) as driver:
        return driver.wait(timeout=300)


@contextmanager
def driving(folder: Path, num_steps: int, *faults: tuple[str, signal.Signals]) -> Iterator[subprocess.Popen[bytes]]:
    address = ray.get_runtime_context().gcs_address
    planned = (word for moment, kind in faults for word in (moment, str(int(kind))))
    words = [str(folder), str(num_steps), address, *planned]
    driver = subprocess.Popen([sys.executable, str(HERE / "small_driver.py"), *words], cwd=HERE.parents[1])
    try:
        yield driver
    finally:
        driver.kill()
        driver.wait()


@pytest.mark.matrix  # a cluster of three nodes takes a minute and more, on two cores
@pytest.mark.parametrize("moments", OF_TWO_NODES, ids="-".join)
@pytest.mark.parametrize("kind", [KILL, HANG], ids=["kill", "hang"])
def test_lost_nodes_take_nothing_with_them(moments: Sequence[str], kind: signal.Signals, tmp_path: Path) -> None:
    """One is lost with groups on it of which there is no copy yet, another one with both learner ranks as well."""
    result = on_nodes(tmp_path, kind, moments)
    homes = {"rollout/0": 1, "reward/0": 1, "rollout/1": 2, "reference/0": 2, "learner/0": 2, "learner/1": 2}
    assert {name: home for name, home in result["homes"].items() if home} == homes
    # An engine behind a node that is gone is dead, silent or cut off in the middle of a push: which one is chance.
    lost = {role: sum(n for kind, n in result["losses"].items() if kind.startswith(role)) for role in LOST_WITH_NODES}
    assert all(num >= LOST_WITH_NODES[role] for role, num in lost.items()), result["losses"]
    before, after = result["moved"]
    assert before == result["nodes"][1] and after == result["nodes"][0]
    assert result["ranks"] == [result["nodes"][0]] * 2 and result["groups"] == 2, "the old places are given back"
    assert left(tmp_path) == []


@pytest.mark.matrix
@pytest.mark.parametrize("moments", OF_TWO_NODES, ids="-".join)
def test_nodes_that_are_slow_cost_nothing_but_time(moments: Sequence[str], tmp_path: Path) -> None:
    assert on_nodes(tmp_path, SLOW, moments)["losses"] == {}
    assert left(tmp_path) == []


def on_nodes(folder: Path, kind: signal.Signals, moments: Sequence[str]) -> dict[str, Any]:
    """What came of a run on three nodes, two of which this happens to; it trained what it was to train."""
    words = [sys.executable, str(HERE / "small_nodes.py"), str(folder), kind.name, *moments]
    subprocess.run(words, cwd=HERE.parents[1], check=True, timeout=600)
    result = json.loads((folder / "result.json").read_text())
    assert result["struck"] == [f"{moment} node/{n} {int(kind)}" for n, moment in enumerate(moments, start=1)]
    assert [sorted(step) for step in result["trained"]] == [sorted(step) for step in expected(len(result["trained"]))]
    return result


def test_one_run_whose_engines_die_join_lose_a_reply_and_are_scaled_up_and_down(tmp_path: Path, local_ray: str) -> None:
    """At staleness 1, so that nothing stands still for it. Who loses a reply is asked to break it off, and stays."""
    seen: dict[str, set[str]] = {}

    async def scale(num: int) -> None:
        for role in (run.rollout_pool, run.rewards.services["reward"].pool, run.reference.pool):
            await role.scale(num)

    async def act(version: int) -> None:
        match version:
            case 2:
                run.saboteur.plan("generating", victim="rollout/0", signal=KILL)
            case 5:
                await until(lambda: not run.saboteur.is_planned("generating") and run.is_whole, BACK_S)
                seen["joined"] = {worker.name for worker in run.workers}
            case 6:
                await scale(3)
            case 8:
                await until(lambda: len(run.workers) == 9 and run.is_whole, BACK_S)
                seen["up"] = {worker.name for worker in run.workers if worker.version in (None, version)}
                for moment in ("replying", "broken_off"):
                    run.saboteur.plan(moment, victim="rollout/0", signal=NONE)
            case 11:
                await scale(1)
            case 13:
                await until(lambda: len(run.workers) == 3, BACK_S)
                seen["down"] = {worker.name for worker in run.workers}

    num_steps = 16
    run = SmallRun(tmp_path, Shape(total_steps=num_steps, max_staleness=1), on_version=act)
    assert asyncio.run(run.go()) == num_steps
    trained = [group_id for step in run.trained for group_id in step]
    assert sorted(trained) == sorted(group_id for step in expected(num_steps) for group_id in step)
    roles = ("rollout", "reward", "reference")
    assert {name: len(names) for name, names in seen.items()} == {"joined": 5, "up": 9, "down": 3}
    assert seen["down"] == {f"{role}/0" for role in roles}
    assert run.saboteur.struck == ["generating rollout/0 9", "replying rollout/0 0", "broken_off rollout/0 0"]
    assert run.losses == {"rollout_died": 1}
    assert (run.retries.keys(), run.retries["LostReplyError"]) == ({"WorkerDiedError", "LostReplyError"}, 1)
    wait_until(lambda: not left(tmp_path), GONE_S, lambda: left(tmp_path))


SOAK_S = 25.0  # beside some 10 to start


async def test_random_faults_lose_nothing_and_leave_nothing_behind(tmp_path: Path, local_ray: str) -> None:
    outcome = await soak(tmp_path, SOAK_S, seed=0)
    assert outcome.violations == [], "\n".join(outcome.lines())
    assert outcome.faults and outcome.ledger.num_steps > 10, "\n".join(outcome.lines())
    wait_until(lambda: not left(tmp_path), GONE_S, lambda: left(tmp_path))
