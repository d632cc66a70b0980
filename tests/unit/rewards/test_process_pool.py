"""Isolated processes side by side: of many calls, those that hang, raise or crash cost themselves and nothing else."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from reward_data import request
from waiting import wait_until

from mobula.cluster.errors import RewardError
from mobula.deploy.host.processes import ProcessId
from mobula.rewards.contract import (
    FailureKind,
    ScoringFailure,
    TimedOutError,
    evaluate,
    evaluate_batch,
)
from mobula.rewards.functions import build_function
from mobula.rewards.isolation.process import IsolatedPool, Tools

FORKS = """
import os, time

def score(number):
    if os.fork():
        time.sleep(0.05)
        return number
    return -1
"""
STARTS = """
import subprocess, time

def start(file):
    with open(file, "w") as pid:
        pid.write(str(subprocess.Popen(["sleep", "1000"]).pid))
    time.sleep(1000)
"""
FILE = '''
"""A reward function in a file of its own."""
import os, time
from dataclasses import dataclass

@dataclass
class Own:
    """Known in the isolated process alone."""
    value: float

def score(request, *, bonus):
    text = request.response.text
    if text == "hang":
        time.sleep(1000)
    if text == "die":
        os._exit(3)
    return Own(1.0) if text == "own" else float(text) + bonus

NUMBER = 7
'''

MEETING = '''
import pathlib, time

def meet(folder, name, names):
    """Returns once all of `names` are here at the same time."""
    (pathlib.Path(folder) / name).touch()
    while not all((pathlib.Path(folder) / other).exists() for other in names):
        time.sleep(0.01)
    return name
'''


@pytest.fixture
def pool() -> Iterator[IsolatedPool]:
    pool = IsolatedPool(num_processes=3, timeout_s=2, start_timeout_s=120)
    yield pool
    pool.close()


def kinds(outcomes: object) -> list[object]:
    return [o.kind if isinstance(o, ScoringFailure) else o.value for o in outcomes]


def test_results_keep_the_order_of_their_calls_and_failures_their_place(pool: IsolatedPool) -> None:
    calls = [(5,), (-1,), (3,), ("x",), (4,), (0,)]
    results = pool.call_many("math:factorial", calls)
    assert [r for r in results if not isinstance(r, RewardError)] == [120, 6, 24, 1]
    assert [type(r) for r in (results[1], results[3])] == [RewardError, RewardError]
    assert pool.call_many("math:factorial", []) == [] and pool.call("math:factorial", 5) == 120


def test_calls_run_side_by_side(pool: IsolatedPool, tmp_path: Path) -> None:
    (tmp_path / "meeting.py").write_text(MEETING)
    calls = [(str(tmp_path), name, ["a", "b", "c"]) for name in "abc"]
    assert pool.call_many(f"{tmp_path}/meeting.py:meet", calls) == ["a", "b", "c"]


def test_a_call_that_hangs_costs_its_own_timeout(pool: IsolatedPool) -> None:
    results = pool.call_many("time:sleep", [(1000,), (1000,), (0,), (1000,), (0,), (0,)])
    assert [isinstance(r, TimedOutError) for r in results] == [True, True, False, True, False, False]


def test_a_fork_that_returns_from_a_function_gives_no_answer(pool: IsolatedPool, tmp_path: Path) -> None:
    (tmp_path / "forks.py").write_text(FORKS)
    target = f"{tmp_path}/forks.py:score"
    assert pool.call_many(target, [(n,) for n in range(12)]) == list(range(12))
    assert pool.call_many("math:factorial", [(n,) for n in range(6)]) == [1, 1, 2, 6, 24, 120]


def test_what_a_function_has_started_ends_with_its_process(pool: IsolatedPool, tmp_path: Path) -> None:
    (tmp_path / "starts.py").write_text(STARTS)
    [result] = pool.call_many(f"{tmp_path}/starts.py:start", [(str(tmp_path / "pid"),)])
    assert isinstance(result, TimedOutError)
    started = int((tmp_path / "pid").read_text())
    wait_until(lambda: ProcessId.of(started) is None, 10.0, lambda: f"process {started} goes on")


def test_the_deadline_ends_every_call(pool: IsolatedPool) -> None:
    pool.call("math:factorial", 1)
    pool.deadline = time.monotonic() + 0.5
    results = pool.call_many("time:sleep", [(1000,)] * 20)
    waited = [float(re.search(r"waited ([0-9.]+) s", str(r))[1]) for r in results if isinstance(r, TimedOutError)]
    assert len(waited) == 20 and max(waited) <= 0.5, "not the 2 s that each would have"
    pool.deadline = float("inf")
    assert pool.call("math:factorial", 3) == 6


def test_closing_leaves_no_process(pool: IsolatedPool) -> None:
    pids = set(pool.call_many("os:getpid", [()] * 20))
    pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_pool_without_processes_is_refused() -> None:
    with pytest.raises(ValueError, match="num_processes=0"):
        IsolatedPool(num_processes=0, timeout_s=1, start_timeout_s=1)


def test_a_pattern_that_backtracks_costs_a_batch_its_own_score(pool: IsolatedPool) -> None:
    function = build_function("format", {"pattern": "(a+)+"}, Tools(pool, "cpu", "float32"))
    outcomes = evaluate_batch(function, [request("aa"), request("a" * 50 + "b"), request("b"), request("a")])
    assert kinds(outcomes) == [1.0, FailureKind.TIMED_OUT, 0.0, 1.0]


def test_a_function_in_a_file_runs_isolated(pool: IsolatedPool, tmp_path: Path) -> None:
    (tmp_path / "my rewards.py").write_text(FILE)
    name, tools = f"{tmp_path}/my rewards.py:score", Tools(pool, "cpu", "float32")
    function = build_function(name, {"bonus": 0.5}, tools)
    assert evaluate(function, request("1")).value == 1.5
    outcomes = evaluate_batch(function, [request(text) for text in ("2", "hang", "x", "die", "nan", "own", "3")])
    failed, timed_out = FailureKind.FAILED, FailureKind.TIMED_OUT
    assert kinds(outcomes) == [2.5, timed_out, failed, failed, FailureKind.NOT_FINITE, failed, 3.5]
    with pytest.raises(ValueError, match="did you mean 'bonus'"):
        build_function(name, {"bonsu": 1}, tools)
    with pytest.raises(ValueError, match=r"has no scor \(did you mean 'score'\?\)"):
        build_function(name.removesuffix("e"), {}, tools)
    with pytest.raises(ValueError, match="int, not a function"):
        build_function(name.replace(":score", ":NUMBER"), {}, tools)


def test_a_file_that_does_not_run_is_refused(pool: IsolatedPool, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def score(request):\n    return (\n")
    with pytest.raises(ValueError, match="SyntaxError"):
        build_function(f"{tmp_path / 'broken.py'}:score", {}, Tools(pool, "cpu", "float32"))
