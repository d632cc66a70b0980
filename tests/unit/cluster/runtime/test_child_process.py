"""A child process: results and errors travel, a late or dead process costs its call alone, none outlives its parent."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_until

from mobula.cluster.errors import DeadlineError, PlacementError, WorkerDiedError
from mobula.cluster.runtime.child_process import ChildProcess, RaisedError
from mobula.deploy.host.processes import ProcessId


@pytest.fixture
def child() -> Iterator[ChildProcess]:
    with ChildProcess() as child:
        yield child


def fail(error: Exception) -> None:
    raise error


def say_and_add(text: str, one: int, *, other: int) -> int:
    print(text, flush=True)
    os.write(1, text.encode())
    return one + other


def start_sleeper(note: Path) -> None:
    note.write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
    time.sleep(1000)


def hang_without_python(note: Path) -> None:
    """Holds the GIL, so that only the kernel ends it."""
    note.write_text(f"{os.getpid()}\n")
    math.factorial(10**9)


def call_in_child(function_name: str, note: str) -> None:
    """What a parent does that is killed meanwhile."""
    ChildProcess().call(1.0, globals()[function_name], Path(note))


def test_results_travel_and_prints_go_to_stderr(child: ChildProcess, capfd: pytest.CaptureFixture[str]) -> None:
    assert child.call(60, say_and_add, "hello " * 10_000, 2, other=3) == 5
    out, err = capfd.readouterr()
    assert out == "" and err.count("hello") == 20_000
    with ChildProcess(is_silent=True) as silent:
        assert silent.call(60, say_and_add, "hello", 2, other=3) == 5
    assert capfd.readouterr() == ("", "")


def test_one_process_answers_call_after_call_also_those_that_were_sent_together(child: ChildProcess) -> None:
    first = child.call(60, os.getpid)
    for number in range(4):
        child.send(60, math.factorial, number)
    assert [child.receive(60) for _ in range(4)] == [1, 1, 2, 6]
    assert child.call(60, os.getpid) == first != os.getpid()


def test_an_error_of_ours_travels_as_itself_another_as_its_text_and_the_process_goes_on(child: ChildProcess) -> None:
    first = child.call(60, os.getpid)
    with pytest.raises(PlacementError, match="no room"):
        child.call(60, fail, PlacementError("no room"))
    with pytest.raises(RaisedError, match="KeyError: 'bug'") as caught:
        child.call(60, fail, KeyError("bug"))
    assert "in fail" in caught.value.__notes__[0]
    with pytest.raises(RaisedError, match="SystemExit: 3"):
        child.call(60, sys.exit, 3)
    with pytest.raises(RaisedError, match="pickle"):
        child.call(60, threading.Lock)
    assert child.call(60, os.getpid) == first


def test_a_call_that_is_late_ends_its_process_and_the_next_call_starts_another(child: ChildProcess) -> None:
    first = child.call(60, os.getpid)
    with pytest.raises(DeadlineError, match=r"waited 0.2 s"):
        child.call(0.2, time.sleep, 1000)
    assert not child.is_running and ProcessId.of(first) is None
    assert child.call(60, os.getpid) != first


def test_a_call_that_was_sent_goes_on_beyond_a_wait_for_it(child: ChildProcess) -> None:
    child.send(60, time.sleep, 1)
    with pytest.raises(DeadlineError):
        child.receive(0.01)
    assert child.receive(60) is None


def test_a_process_that_dies_is_an_error_with_its_exit_code(child: ChildProcess) -> None:
    with pytest.raises(WorkerDiedError, match="died with exit code 3"):
        child.call(60, os._exit, 3)
    os.kill(child.call(60, os.getpid), signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="died with exit code -9"):
        child.call(60, os.getpid)
    assert child.call(60, math.factorial, 3) == 6


def test_memory_has_a_limit_and_the_environment_additions() -> None:
    with ChildProcess(env={"MOBULA_TEST": "yes"}, memory_limit_bytes=1 << 30) as child:
        assert child.call(60, os.getenv, "MOBULA_TEST") == "yes"
        with pytest.raises(RaisedError, match="MemoryError"):
            child.call(60, bytearray, 2 << 30)


def test_a_fork_that_returns_from_a_call_gives_no_second_answer(child: ChildProcess) -> None:
    assert all(child.call(60, os.fork) > 0 for _ in range(5))
    assert child.call(60, math.factorial, 5) == 120


def test_everything_that_a_call_started_ends_with_its_process(child: ChildProcess, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    child.send(60, start_sleeper, note)
    wait_until(lambda: note.exists() and note.read_text() != "")
    child.close()
    wait_until(lambda: ProcessId.of(int(note.read_text())) is None)


@pytest.mark.parametrize("function", ["start_sleeper", "hang_without_python"])
def test_a_child_ends_after_its_parent_was_killed(function: str, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    script = f"import {__name__} as here; here.call_in_child({function!r}, {str(note)!r})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    parent = subprocess.Popen([sys.executable, "-c", script], env=environment)
    wait_until(lambda: note.exists() and note.read_text() != "")
    [child] = map(int, Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split())
    parent.kill()
    parent.wait()
    stat = Path(f"/proc/{child}/stat")
    wait_until(lambda: not stat.exists() or " Z " in stat.read_text())  # a container's init may not collect it
    if function == "start_sleeper":  # what it started is in no one's group any more
        os.kill(int(note.read_text()), signal.SIGKILL)
