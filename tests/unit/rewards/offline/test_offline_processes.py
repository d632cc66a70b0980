"""The processes of offline scoring: results in order, and every failure of one of them is an error and no hang."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from mobula.cluster.errors import DeadlineError, WorkerDiedError
from mobula.rewards.offline.processes import Pulse, run_in_order


def children() -> set[int]:
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return {int(pid) for pid in path.read_text().split()}


@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_results_come_in_the_order_of_their_tasks(num_processes: int) -> None:
    def work(task: int) -> tuple[int, int]:
        time.sleep(0.02 * (task % 3 == 0))  # the first of three is the last to be done
        return task * task, os.getpid()

    found = list(run_in_order(work, list(range(20)), num_processes=num_processes, timeout_s=30))
    assert [square for square, _ in found] == [n * n for n in range(20)]
    assert len({pid for _, pid in found}) == num_processes


def test_results_do_not_pile_up_behind_a_slow_task(tmp_path: Path) -> None:
    def work(task: int) -> int:
        (tmp_path / str(task)).touch()
        if task == 0:
            while not (tmp_path / "5").exists():  # as many as two processes may be ahead
                time.sleep(0.005)
            time.sleep(0.1)
            return len(list(tmp_path.iterdir()))
        return -1

    assert next(run_in_order(work, list(range(100)), num_processes=2, timeout_s=30)) == 6


def test_an_error_of_the_work_is_raised_as_it_is() -> None:
    def work(task: int) -> int:
        if task == 3:
            raise ValueError("task three")
        return task

    with pytest.raises(ValueError, match="task three"):
        list(run_in_order(work, list(range(9)), num_processes=2, timeout_s=30))


def test_a_process_that_is_killed_is_an_error_that_names_its_task() -> None:
    def work(task: str) -> str:
        if task == "part 3":
            os.kill(os.getpid(), signal.SIGKILL)
        return task

    before = children()
    with pytest.raises(WorkerDiedError, match="part 3 ended with code -9"):
        list(run_in_order(work, [f"part {i}" for i in range(9)], num_processes=2, timeout_s=30))
    assert children() <= before


def test_a_process_that_hangs_is_an_error_that_names_its_task_and_no_process_stays() -> None:
    def work(task: str) -> str:
        if task == "part 1":
            time.sleep(600)
        return task

    before = children()
    with pytest.raises(DeadlineError, match="within 0.5 s: part 1"):
        list(run_in_order(work, [f"part {i}" for i in range(4)], num_processes=2, timeout_s=0.5))
    assert children() <= before


def test_a_process_that_gets_on_is_not_late() -> None:
    pulse = Pulse()

    def work(task: int) -> int:
        for _ in range(6):
            time.sleep(0.2)
            pulse.beat()
        return task

    how = {"num_processes": 1, "timeout_s": 0.6, "may_hang": True}
    assert list(run_in_order(work, [1], pulse=pulse, **how)) == [1]
    with pytest.raises(DeadlineError, match="within 0.6 s: 1"):
        list(run_in_order(work, [1], **how))


def test_a_process_that_is_spent_is_replaced_and_no_process_stays() -> None:
    done: list[int] = []  # of one process

    def work(task: int) -> int:
        done.append(task)
        return os.getpid()

    before = children()
    how = {"num_processes": 1, "timeout_s": 30, "may_hang": True}
    pids = list(run_in_order(work, range(5), is_spent=lambda: len(done) == 2, **how))
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [2, 2, 1]
    assert children() <= before


def test_a_reader_that_stops_leaves_no_process() -> None:
    before = children()
    results = run_in_order(abs, list(range(50)), num_processes=2, timeout_s=30)
    assert next(results) == 0
    assert len(children() - before) == 2
    results.close()
    assert children() <= before
