"""Processes are named by id and start time and ended alone; signals that ask a run to end are interrupts."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from mobula.deploy.host import processes
from mobula.deploy.host.processes import ProcessId, end, marked_processes
from mobula.deploy.host.terminal import ending_signals, ignore_signals, signals_raise, sigterm_stays_ours, until_signal

VARIABLE = "MOBULA_PROCESS_TEST"
OBEYS = "import time; print('up', flush=True); time.sleep(1000)"
IGNORES = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {OBEYS}"
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a Python program in a session of its own and waits until it runs."""
    started = []

    def run(program: str, **env: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(child)
        assert child.stdout.readline() == "up\n"
        return child

    yield run
    for child in started:
        child.kill()
        child.wait()


def id_of(child: subprocess.Popen[str]) -> ProcessId:
    found = ProcessId.of(child.pid)
    assert found is not None
    return found


def test_a_process_is_alive_until_it_ends_also_as_a_zombie(start: Start) -> None:
    child = start(OBEYS)
    process = id_of(child)
    assert process.is_alive and ProcessId.parse(str(process)) == process
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended and is not reaped yet
    assert not process.is_alive
    child.wait()
    assert not process.is_alive and ProcessId.of(child.pid) is None


def test_a_process_id_that_was_given_to_another_is_not_mistaken(start: Start) -> None:
    child = start(OBEYS)
    earlier = replace(id_of(child), start_ticks=id_of(child).start_ticks - 1)
    assert not earlier.is_alive
    assert end(earlier, timeout_s=1)
    assert child.poll() is None, "another process was ended"


def test_of_another_machines_process_nothing_is_known(start: Start) -> None:
    elsewhere = replace(id_of(start(OBEYS)), host="elsewhere/with-a-slash")
    assert not elsewhere.is_here and not elsewhere.is_alive
    assert ProcessId.parse(str(elsewhere)) == elsewhere


@pytest.mark.parametrize(("program", "ended_by"), [(OBEYS, signal.SIGTERM), (IGNORES, signal.SIGKILL)])
def test_what_does_not_end_in_good_order_is_killed(start: Start, program: str, ended_by: signal.Signals) -> None:
    child = start(program)
    assert end(id_of(child), timeout_s=0.5)
    assert child.wait(5) == -ended_by


def test_what_is_gone_already_counts_as_ended(start: Start) -> None:
    child = start(OBEYS)
    process = id_of(child)
    child.kill()
    child.wait()
    assert end(process, timeout_s=1)


def test_what_outlives_the_kill_is_reported(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.signal, "pidfd_send_signal", lambda handle, number: None)
    monkeypatch.setattr(processes, "KILLED_WITHIN_S", 0.05)
    assert not end(id_of(start(OBEYS)), timeout_s=0.05)


def test_a_child_that_left_its_session_is_found_by_its_mark(start: Start) -> None:
    child = start(OBEYS, **{VARIABLE: "run/1"})
    start(OBEYS)
    [found] = marked_processes(VARIABLE)
    assert found.process == id_of(child)
    assert found.environment[VARIABLE] == "run/1" and "time.sleep(1000)" in found.command


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_loop_is_an_interrupt(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup
    try:
        with pytest.raises(KeyboardInterrupt), signals_raise():
            os.kill(os.getpid(), number)
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_under_nohup_a_hangup_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert ending_signals() == (signal.SIGTERM,)
        with signals_raise():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


async def interrupted() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(60)


def test_signals_that_come_while_a_run_closes_end_nothing() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    with signals_raise():
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(until_signal(interrupted()))
        for number in numbers:  # the summary is being written
            os.kill(os.getpid(), number)
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_library_does_not_keep_sigterm() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with signals_raise():
        with sigterm_stays_ours():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        ignore_signals()
        with sigterm_stays_ours():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_handler_of_a_library_stays_where_there_was_none_of_ours() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with sigterm_stays_ours():
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        assert signal.getsignal(signal.SIGTERM) == signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
