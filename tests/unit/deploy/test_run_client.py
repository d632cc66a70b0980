"""Client of runs, what dead runs left, and processes: named by id and start time, ended alone, interrupted in order."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from metrics_data import go_on

from mobula.cluster.errors import DeadlineError, PlacementError, PreflightError, RunOverError, WorkerDiedError
from mobula.deploy.host import processes
from mobula.deploy.host.processes import ProcessId, end, in_side_process, marked_processes
from mobula.deploy.host.run_folder import RECORD_FILE, SESSION_FILE, RunMark, RunRecord
from mobula.deploy.host.terminal import ending_signals, ignore_signals, signals_raise, sigterm_stays_ours, until_signal
from mobula.deploy.run import run_client
from mobula.deploy.run.run_client import Leftover, RunAddress, find_leftovers, find_run, free, read_status


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`runs` in the working folder of the caller."""
    folder = tmp_path / "caller" / "runs"
    (folder / "digits").mkdir(parents=True)
    (folder / "digits" / "config.yaml").touch()
    (folder / "latest").symlink_to("digits")
    monkeypatch.chdir(folder.parent)
    return folder


def test_the_latest_run_is_found_unless_another_is_named(runs: Path) -> None:
    go_on(runs / "digits")
    (runs.parent / "elsewhere" / "sums").mkdir(parents=True)
    go_on(runs.parent / "elsewhere" / "sums")
    digits = RunAddress("digits", "10.0.0.1:6379", "of digits")
    assert find_run(None, None, None) == find_run("digits", None, None) == digits
    assert find_run(None, Path("elsewhere/sums"), None) == RunAddress("sums", "10.0.0.1:6379", "of sums")


def test_a_run_on_a_named_cluster_needs_its_name_alone() -> None:
    assert find_run("digits", None, "10.0.0.9:6379") == RunAddress("digits", "10.0.0.9:6379", "digits")
    with pytest.raises(PreflightError, match="needs the run's NAME"):
        find_run(None, None, "10.0.0.9:6379")


def test_a_run_that_never_was_is_the_askers_mistake() -> None:
    with pytest.raises(PreflightError, match="there is no run in sums or runs/sums"):
        find_run("sums", None, None)


def test_a_run_that_is_over_is_refused_with_how_it_ended(runs: Path) -> None:
    with pytest.raises(RunOverError, match="run digits is not going on .*not begun, or ended before"):
        find_run(None, None, None)
    (runs / "digits" / "summary.json").write_text(json.dumps({"status": "done"}))
    with pytest.raises(RunOverError, match="run digits is not going on: it is done, and .*report.html"):
        find_run(None, None, None)


def test_a_run_whose_driver_was_killed_is_dead_also_if_another_process_has_its_id(runs: Path) -> None:
    go_on(runs / "digits", start_ticks_off=-1)
    with pytest.raises(RunOverError, match=f"run digits is dead: its driver, process {os.getpid()}, was killed"):
        find_run(None, None, None)


def test_a_driver_on_another_machine_is_asked_itself(runs: Path) -> None:
    go_on(runs / "digits", start_ticks_off=-1, host="another machine")
    assert find_run(None, None, None).run == "digits"


def test_a_broken_record_is_named(runs: Path) -> None:
    (runs / "digits" / RECORD_FILE).write_text("{")
    with pytest.raises(PreflightError, match="cluster.json is no record of a run"):
        find_run(None, None, None)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "127.0.0.1:port"])
def test_where_nothing_listens_the_run_is_over(address: str) -> None:
    with pytest.raises(RunOverError, match=f"run digits is over: no Ray cluster answers at {address}"):
        read_status(RunAddress("digits", address, "digits"), timeout_s=60)


@pytest.fixture
def silence() -> Iterator[str]:
    """The address of something that listens and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_cluster_that_does_not_answer_costs_the_deadline(silence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_client, "RESERVE_S", 0.0)
    started = time.monotonic()
    with pytest.raises((DeadlineError, WorkerDiedError), match="the status of run digits|Error"):
        read_status(RunAddress("digits", silence, "digits"), timeout_s=4)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("failure", [DeadlineError("waited 60 s"), WorkerDiedError("its cluster is gone")])
def test_a_run_that_ends_while_asked_is_over(runs: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    def end(*args: object) -> None:
        (runs / "digits" / RECORD_FILE).unlink(missing_ok=True)
        (runs / "digits" / "summary.json").write_text(json.dumps({"status": "done"}))
        raise failure

    go_on(runs / "digits")
    run = find_run(None, None, None)
    monkeypatch.setattr(run_client, "knock", lambda address, consequence: None)
    monkeypatch.setattr(run_client, "in_side_process", end)
    with pytest.raises(RunOverError, match="run digits is not going on: it is done, and .*report.html"):
        run_client.scale(run, {"reward": 2}, timeout_s=60)
    with pytest.raises(type(failure), match=str(failure)):
        run_client.scale(RunAddress("digits", run.address, "of digits"), {"reward": 2}, timeout_s=60)


def test_a_cluster_that_vanishes_while_it_is_asked_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def vanish(*args: object) -> None:
            server.close()
            raise DeadlineError("waited 60 s")

        monkeypatch.setattr(run_client, "in_side_process", vanish)
        run = RunAddress("digits", f"127.0.0.1:{server.getsockname()[1]}", "digits")
        with pytest.raises(RunOverError, match="run digits is over: no Ray cluster answers"):
            run_client.scale(run, {"reward": 2}, timeout_s=60)


def test_a_busy_run_is_still_asked_for_in_vain(runs: Path, silence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(*args: object) -> None:
        raise DeadlineError("waited 60 s for run digits to scale")

    go_on(runs / "digits")
    monkeypatch.setattr(run_client, "in_side_process", wait)
    with pytest.raises(DeadlineError, match="waited 60 s for run digits"):
        run_client.scale(RunAddress("digits", silence, "digits", runs / "digits"), {"reward": 2}, timeout_s=60)


VARIABLE = "MOBULA_PROCESS_TEST"
OBEYS = "import time; print('up', flush=True); time.sleep(1000)"
IGNORES = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {OBEYS}"
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a Python program in a session of its own and waits until it runs."""
    started = []

    def run(program: str, **env: str) -> subprocess.Popen[str]:
        options = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
        child = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, **env}, **options)
        started.append(child)
        assert child.stdout.readline() == "up\n"
        return child

    yield run
    for child in started:
        child.kill()
        child.wait()


def test_a_process_is_alive_until_it_ends_also_as_a_zombie(start: Start) -> None:
    child = start(OBEYS)
    process = ProcessId.of(child.pid)
    assert process.is_alive and ProcessId.parse(str(process)) == process
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended and is not reaped yet
    assert not process.is_alive
    child.wait()
    assert not process.is_alive and ProcessId.of(child.pid) is None
    assert end(process, timeout_s=1), "what is gone counts as ended"


def test_a_process_id_that_was_given_to_another_is_not_mistaken(start: Start) -> None:
    child = start(OBEYS)
    earlier = replace(ProcessId.of(child.pid), start_ticks=ProcessId.of(child.pid).start_ticks - 1)
    assert not earlier.is_alive
    assert end(earlier, timeout_s=1)
    assert child.poll() is None, "another process was ended"


def test_of_another_machines_process_nothing_is_known(start: Start) -> None:
    elsewhere = replace(ProcessId.of(start(OBEYS).pid), host="elsewhere/with-a-slash")
    assert not elsewhere.is_here and not elsewhere.is_alive
    assert ProcessId.parse(str(elsewhere)) == elsewhere


@pytest.mark.parametrize(("program", "ended_by"), [(OBEYS, signal.SIGTERM), (IGNORES, signal.SIGKILL)])
def test_what_does_not_end_in_good_order_is_killed(start: Start, program: str, ended_by: signal.Signals) -> None:
    child = start(program)
    assert end(ProcessId.of(child.pid), timeout_s=0.5)
    assert child.wait(5) == -ended_by


def test_what_outlives_the_kill_is_reported(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.signal, "pidfd_send_signal", lambda handle, number: None)
    monkeypatch.setattr(processes, "KILLED_WITHIN_S", 0.05)
    assert not end(ProcessId.of(start(OBEYS).pid), timeout_s=0.05)


def test_a_child_that_left_its_session_is_found_by_its_mark(start: Start) -> None:
    child = start(OBEYS, **{VARIABLE: "run/1"})
    start(OBEYS)
    [found] = marked_processes(VARIABLE)
    assert found.process == ProcessId.of(child.pid)
    assert found.environment[VARIABLE] == "run/1" and "time.sleep(1000)" in found.command


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in SIGNALS]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_loop_is_an_interrupt(usual_signals: None, number: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt), signals_raise():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) == signal.SIG_DFL


def test_under_nohup_a_hangup_is_ignored(usual_signals: None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert ending_signals() == (signal.SIGTERM,)
    with signals_raise():
        os.kill(os.getpid(), signal.SIGHUP)


async def interrupted() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(60)


def test_signals_that_come_while_a_run_closes_end_nothing(usual_signals: None) -> None:
    before = handlers()
    with signals_raise():
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(until_signal(interrupted()))
        for number in SIGNALS:  # the summary is being written
            os.kill(os.getpid(), number)
    assert handlers() == before


async def hung_up() -> None:
    os.kill(os.getpid(), signal.SIGHUP)
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.sleep(0.2)


def test_two_hangups_at_once_ask_once(usual_signals: None) -> None:
    asked: list[bool] = []

    def is_handled() -> bool:
        asked.append(True)
        return True

    with signals_raise():
        asyncio.run(until_signal(hung_up(), is_handled))
    assert asked == [True]


def test_a_library_does_not_keep_sigterm(usual_signals: None) -> None:
    with signals_raise():
        with sigterm_stays_ours():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        ignore_signals()
        with sigterm_stays_ours():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_handler_of_a_library_stays_where_there_was_none_of_ours(usual_signals: None) -> None:
    with sigterm_stays_ours():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    assert signal.getsignal(signal.SIGTERM) == signal.default_int_handler


def fail(error: Exception) -> None:
    raise error


def test_a_result_and_an_error_of_ours_travel_as_they_are_and_another_error_as_its_text() -> None:
    assert in_side_process(os.path.join, 60, "a path", "a", "b") == "a/b"
    with pytest.raises(PlacementError, match="no room"):
        in_side_process(fail, 60, "a failure", PlacementError("no room"))
    with pytest.raises(WorkerDiedError, match="KeyError: 'bug'"):
        in_side_process(fail, 60, "a failure", KeyError("bug"))


def test_a_side_process_that_dies_or_hangs_is_an_error() -> None:
    with pytest.raises(WorkerDiedError, match="what waited for a word: its process died with exit code 3"):
        in_side_process(os._exit, 60, "a word", 3)
    with pytest.raises(DeadlineError, match="waited 0.2 s for a sleeper"):
        in_side_process(time.sleep, 0.2, "a sleeper", 1000)


SESSION = "session_2026-01-02_03-04-05_678901_42"


@pytest.fixture(autouse=True)
def ray_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    return tmp_path / "ray"


def orphaned(start: Start, mark: RunMark) -> subprocess.Popen[str]:
    """A process that carries a mark."""
    return start(OBEYS, **mark.environment)


def living() -> ProcessId:
    return ProcessId.of(os.getpid())


def dead() -> ProcessId:
    """A driver of this machine that had our process id once."""
    return replace(living(), start_ticks=living().start_ticks - 1)


def found(tmp_path: Path, run: str) -> list[Leftover]:
    return [leftover for leftover in find_leftovers(runs=tmp_path / "runs") if leftover.run == run]


def freed(leftover: Leftover) -> str:
    """Why it is not ended or removed; empty if it is."""
    [(_, refusal)] = free([leftover.id], [leftover], timeout_s=5)
    return refusal


def write_session(tmp_path: Path, mark: RunMark) -> RunRecord:
    """What a killed run leaves on disk."""
    folder = tmp_path / "ray" / SESSION
    (folder / "logs").mkdir(parents=True)
    run_folder = tmp_path / "runs" / "lost"
    run_folder.mkdir(parents=True)
    record = RunRecord("lost", run_folder, mark, "127.0.0.1:1", "lost", folder)
    for path in record.paths:
        record.write(path)
    return record


def test_a_process_whose_driver_is_dead_is_listed_and_ended_by_its_id(tmp_path: Path, start: Start) -> None:
    orphan, other = orphaned(start, RunMark("lost/1", dead())), orphaned(start, RunMark("lost/2", dead()))
    leftovers = {leftover.id: leftover for leftover in found(tmp_path, "lost")}
    names = [f"process-{p.pid}-{p.start_ticks}" for p in map(ProcessId.of, (orphan.pid, other.pid)) if p]
    assert sorted(leftovers) == sorted(names)
    assert "time.sleep(1000)" in leftovers[names[0]].what
    assert freed(leftovers[names[0]]) == ""
    assert orphan.wait(5) != 0 and other.poll() is None
    assert [leftover.id for leftover in found(tmp_path, "lost")] == [names[1]]


def test_processes_of_living_and_of_far_drivers_are_left_alone(tmp_path: Path, start: Start) -> None:
    orphaned(start, RunMark("lives/1", living()))
    orphaned(start, RunMark("far/1", ProcessId("another machine", 1, 1)))
    assert found(tmp_path, "lives") == found(tmp_path, "far") == []


def test_an_id_that_names_nothing_ends_nothing(tmp_path: Path, start: Start) -> None:
    orphan = orphaned(start, RunMark("lost/1", dead()))
    [leftover] = found(tmp_path, "lost")
    with pytest.raises(PreflightError, match="process-1-1: no leftover has this id"):
        list(free([leftover.id, "process-1-1"], [leftover], timeout_s=5))
    assert orphan.poll() is None


def test_a_session_of_a_dead_run_is_listed_once_and_removed_with_its_records(tmp_path: Path) -> None:
    record = write_session(tmp_path, RunMark("lost/0123456789abcdef", dead()))
    (tmp_path / "runs" / "latest").symlink_to("lost")
    [session] = found(tmp_path, "lost")
    assert (session.id, session.what) == ("session-0123456789ab", str(record.session_folder))
    assert freed(session) == ""
    assert not any(path.exists() for path in record.paths) and not record.session_folder.exists()
    assert record.run_folder.is_dir(), "the run itself stays"
    assert found(tmp_path, "lost") == []


def test_a_session_that_is_still_used_stays(tmp_path: Path, start: Start) -> None:
    mark = RunMark("lost/1", dead())
    record = write_session(tmp_path, mark)
    orphan = orphaned(start, mark)
    session = found(tmp_path, "lost")[-1]
    assert f"still used by processes {orphan.pid}" in freed(session)
    assert all(path.exists() for path in record.paths)


def test_a_process_that_hides_its_environment_is_known_by_what_it_writes(tmp_path: Path) -> None:
    record = write_session(tmp_path, RunMark("lost/1", dead()))
    with (record.session_folder / "logs" / "agent.log").open("w") as log:
        words = [sys.executable, "-c", OBEYS]
        agent = subprocess.Popen(words, env={}, stdout=subprocess.PIPE, stderr=log, text=True)  # as setproctitle does
    try:
        assert agent.stdout.readline() == "up\n"
        process, session = found(tmp_path, "lost")
        assert process.id.startswith(f"process-{agent.pid}-")
        assert f"still used by processes {agent.pid}" in freed(session)
        assert freed(process) == ""
        assert agent.wait(5) != 0
    finally:
        agent.kill()
        agent.wait()


def test_a_folder_that_is_no_session_is_not_removed(tmp_path: Path) -> None:
    record = write_session(tmp_path, RunMark("lost/1", dead()))
    (record.session_folder / "logs").rmdir()
    [session] = found(tmp_path, "lost")
    assert "does not look like a Ray session folder" in freed(session) and record.session_folder.is_dir()


def test_the_record_of_the_run_that_goes_on_in_the_same_folder_stays(tmp_path: Path) -> None:
    old = write_session(tmp_path, RunMark("lost/1", dead()))
    new = RunRecord("lost", old.run_folder, RunMark("lost/2", living()), "127.0.0.1:2", "lost", None)
    new.write(old.run_folder / RECORD_FILE)
    [session] = found(tmp_path, "lost")
    assert freed(session) == ""
    assert RunRecord.read(old.run_folder / RECORD_FILE) == new


def test_a_session_of_a_living_run_and_files_of_others_are_left_alone(tmp_path: Path) -> None:
    write_session(tmp_path, RunMark("lost/1", living()))
    other = tmp_path / "ray" / "session_2026-01-02_03-04-05_678901_43"
    other.mkdir()
    (other / SESSION_FILE).write_text("{}")
    assert [leftover for leftover in find_leftovers(runs=tmp_path / "runs") if "session" in leftover.id] == []
