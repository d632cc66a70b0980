"""A thread for one job after the other that does not keep the process from ending."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from mobula.cluster.runtime.concurrency import DaemonThread


def test_jobs_run_in_order_on_one_thread_and_report_results_and_errors() -> None:
    thread, order = DaemonThread("jobs"), []

    def job(number: int) -> int:
        order.append((number, threading.current_thread().name))
        return 6 // number

    futures = [thread.submit(job, number) for number in (3, 0, 2)]
    thread.shutdown()
    assert futures[2].result(30) == 3 and futures[0].result() == 2
    with pytest.raises(ZeroDivisionError):
        futures[1].result()
    assert order == [(3, "jobs"), (0, "jobs"), (2, "jobs")]


def test_a_job_that_was_cancelled_before_its_turn_does_not_run() -> None:
    thread, go_on, ran = DaemonThread("jobs"), threading.Event(), []
    first, second = thread.submit(go_on.wait, 30), thread.submit(ran.append, 2)
    assert second.cancel()
    go_on.set()
    assert first.result(30) and thread.submit(len, ran).result(30) == 0


def test_a_process_ends_while_a_job_hangs() -> None:
    program = (
        "import threading; from mobula.cluster.runtime.concurrency import DaemonThread; begun = threading.Event(); "
        "DaemonThread('stuck').submit(lambda: (begun.set(), threading.Event().wait())); assert begun.wait(30)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
