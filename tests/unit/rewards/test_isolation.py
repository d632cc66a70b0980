"""Calls that hang, raise or crash, in processes and in threads, cost their own responses the score and nothing else."""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
from fakes import AT_ONCE, FakeHosts, LocalHandle
from reward_data import answers, component, pool_over, request, rewards_of, values_or_kinds, worker_of
from waiting import wait_until

from mobula.cluster.errors import EngineLostError, RewardError, StuckError
from mobula.cluster.failures import Failure
from mobula.deploy.host.processes import ProcessId
from mobula.rewards.contract import Outcome, RewardRequest, ScoringFailure, TimedOutError
from mobula.rewards.functions import BUILT_IN, build_function
from mobula.rewards.http.server import MAX_STUCK, RewardScorer
from mobula.rewards.isolation.process import InTime, IsolatedPool
from mobula.rewards.models.loading import score_in_batches
from mobula.rewards.offline.rows import Batch
from mobula.rewards.offline.scorer import RecordScorer, ScoringOptions
from mobula.rewards.pool.worker import Question, RewardWorker
from mobula.rewards.tools import Tools

RELEASED = threading.Event()


class Engine:
    """Scores by the first digit, and fails for good over a text once."""

    has_failed = False

    def __init__(self, tools: Tools) -> None: ...

    def score_batch(self, requests: Sequence[RewardRequest]) -> list[float]:
        if not Engine.has_failed and any(request.response.text.endswith("fault") for request in requests):
            Engine.has_failed = True
            raise EngineLostError(Failure("RuntimeError: an illegal memory access"))
        return [float(request.response.text[0]) for request in requests]


class Model:
    """Computes in batches of two, and hangs over some texts until it is released."""

    def __init__(self, tools: Tools) -> None:
        self._in_time = tools.in_time

    def score_batch(self, requests: Sequence[RewardRequest]) -> list[float | Outcome]:
        return score_in_batches(
            requests,
            encode=lambda request: request.response.text,
            size=lambda text: -int(text[0]),
            score=self._score,
            batch_size=2,
            in_time=self._in_time,
        )

    def _score(self, texts: Sequence[str]) -> list[float]:
        if any(text.endswith("hang") for text in texts):
            RELEASED.wait()
        return [float(text[0]) for text in texts]


@pytest.fixture
def releasing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(BUILT_IN, "model", f"{__name__}:Model")
    RELEASED.clear()
    yield
    RELEASED.set()


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILT_IN, "model", f"{__name__}:Engine")
    monkeypatch.setattr(Engine, "has_failed", False)


CONFIG = rewards_of(component("model", "model"))


def worker() -> RewardWorker:
    return worker_of(CONFIG, function_timeout_s=0.2, group_timeout_s=5)


async def scored_by_pool(*groups: Sequence[str]) -> tuple[list[list[float | None]], dict[str, int]]:
    """The values of groups of these texts, of a pool that replaces its worker once, and its failures."""
    hosts, first = FakeHosts(lambda index: LocalHandle(worker()), booked=1), LocalHandle(worker())
    pool = pool_over(CONFIG, [first], hosts=hosts, restarts=AT_ONCE)
    rewards = [await pool.score(answers(f"0/{i}/a", *texts), f"0/{i}/a") for i, texts in enumerate(groups)]
    assert hosts.stopped == [(0, first)]
    await pool.close()
    return [[reward and reward.value for reward in own] for own in rewards], +pool.failures


def test_work_that_is_late_is_left_behind_and_counted_until_it_comes_back() -> None:
    in_time, gate = InTime(timeout_s=0.05), threading.Event()
    first = in_time.call(threading.get_ident, "a look")
    with pytest.raises(TimedOutError, match="waited 0.1 s for the gate"):
        in_time.call(gate.wait, "the gate", num_responses=2)
    assert in_time.num_stuck == 1
    second = in_time.call(threading.get_ident, "a look")
    assert len({first, second, threading.get_ident()}) == 3, "the next work has a thread of its own"
    assert in_time.call(threading.get_ident, "a look") == second
    gate.set()
    wait_until(lambda: in_time.num_stuck == 0)


def test_what_the_work_raises_travels_as_it_is() -> None:
    in_time = InTime(timeout_s=5)
    for error in (KeyError("a bug"), TimeoutError("its own")):
        with pytest.raises(type(error)) as caught:
            in_time.call(Mock(side_effect=error), "it")
        assert caught.value is error
    assert in_time.num_stuck == 0


def test_without_time_nothing_begins_and_without_a_limit_nothing_leaves_the_thread() -> None:
    in_time = InTime()
    assert in_time.call(threading.get_ident, "a look") == threading.get_ident()
    in_time.deadline = time.monotonic() - 1
    with pytest.raises(TimedOutError, match="no time was left for a look"):
        in_time.call(threading.get_ident, "a look")
    in_time.deadline = math.inf
    assert in_time.call(lambda: 7, "it") == 7


def test_a_model_that_hangs_costs_its_batch_and_the_next_call_asks_for_another_process(releasing: None) -> None:
    one = worker()
    (scored,) = one.score([Question(answers("0/0/a", "1", "2", "3", "4 hang", "5"))])
    found = values_or_kinds(outcome["model"] for outcome in scored.outcomes)
    assert found == [1.0, 2.0, "timed_out", "timed_out", 5.0]
    with pytest.raises(StuckError, match="1 computations of service 'reward' hang"):
        one.score([Question(answers("0/1/a", "1"))])


@pytest.mark.usefixtures("releasing")
async def test_the_pool_replaces_a_worker_that_a_model_hangs_in_and_loses_no_group() -> None:
    assert await scored_by_pool(["1 hang"], ["2"]) == ([[None], [2.0]], {"timed_out": 1, "worker_hung": 1})


@pytest.mark.usefixtures("failing")
async def test_the_pool_replaces_a_worker_whose_engine_failed_and_scores_its_group_with_the_next() -> None:
    assert await scored_by_pool(["1", "2 fault"]) == ([[1.0, 2.0]], {"worker_died": 1})


@pytest.mark.usefixtures("failing")
def test_a_servers_lane_whose_engine_failed_refuses() -> None:
    scorer = RewardScorer(CONFIG, timeout_s=5, device="cpu", dtype="float32")
    (found,) = scorer.score([request("2 fault")], time.monotonic() + 5)
    assert isinstance(found, ScoringFailure) and "an illegal memory access: restart the server" in found.reason
    assert scorer.is_stuck
    scorer.close()


@pytest.mark.usefixtures("releasing")
def test_offline_a_model_that_hangs_costs_its_records_alone_and_then_its_process(tmp_path: Path) -> None:
    options = ScoringOptions(CONFIG, tmp_path, timeout_s=4, pass_threshold=0, top_k=0, max_ids=0, writes_rows=True)
    scorer = RecordScorer(options)  # a twentieth of the time for each response

    def rewards(*texts: str) -> tuple[list[object], bool]:
        scored = scorer.score(Batch(1, [json.dumps({"response": text}).encode() for text in texts], 1))
        rows = map(json.loads, scored.rows.splitlines())
        return [row.get("reward", row.get("unscored")) for row in rows], scored.is_stuck

    assert rewards("1", "2") == ([1.0, 2.0], False)
    late = "model: timed_out"
    assert rewards("1", "2", "3 hang", "4") == ([1.0, 2.0, late, late], True), "the last two are one batch of the model"


@pytest.mark.usefixtures("releasing")
def test_a_servers_lane_goes_on_past_a_model_that_hangs_until_too_many_do() -> None:
    scorer = RewardScorer(CONFIG, timeout_s=0.4, device="cpu", dtype="float32")

    def found(*texts: str) -> list[object]:
        return values_or_kinds(scorer.score([request(text) for text in texts], time.monotonic() + 5))

    for _ in range(MAX_STUCK):
        assert found("2 hang", "1") == ["timed_out", "timed_out"], "they are one batch of the model"
        assert found("1") == [1.0] or scorer.is_stuck
    assert found("1") == ["timed_out"] and scorer.is_stuck
    RELEASED.set()
    wait_until(lambda: found("1") == [1.0])
    assert not scorer.is_stuck
    scorer.close()


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


def test_a_file_that_does_not_run_is_refused(pool: IsolatedPool, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def score(request):\n    return (\n")
    with pytest.raises(ValueError, match="SyntaxError"):
        build_function(f"{tmp_path / 'broken.py'}:score", {}, Tools(pool, "cpu", "float32"))
