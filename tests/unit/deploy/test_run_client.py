"""Client of runs, and what dead runs left."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from metrics_data import go_on

from mobula.cluster.errors import DeadlineError, PlacementError, PreflightError, RunOverError, WorkerDiedError
from mobula.deploy.host.processes import ProcessId, in_side_process
from mobula.deploy.host.run_folder import RECORD_FILE, SESSION_FILE, RunMark, RunRecord
from mobula.deploy.run import run_client
from mobula.deploy.run.run_client import Leftover, RunAddress, find_leftovers, find_run, free, read_status


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`runs` in the working folder of the caller."""
    folder = tmp_path / "caller" / "runs"
    (folder / "digits").mkdir(parents=True)
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
    with pytest.raises(PreflightError, match="no run folder runs/sums"):
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
def test_a_run_that_ends_while_it_is_asked_is_reported_as_over(
    runs: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
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


def fail(error: Exception) -> None:
    raise error


def die() -> None:
    os._exit(3)


def test_a_side_process_gives_its_result() -> None:
    assert in_side_process(os.path.join, 60, "a path", "a", "b") == "a/b"


def test_an_error_of_ours_travels_as_itself_and_another_as_its_text() -> None:
    with pytest.raises(PlacementError, match="no room"):
        in_side_process(fail, 60, "a failure", PlacementError("no room"))
    with pytest.raises(WorkerDiedError, match="KeyError: 'bug'"):
        in_side_process(fail, 60, "a failure", KeyError("bug"))


def test_a_side_process_that_dies_or_hangs_is_an_error() -> None:
    with pytest.raises(WorkerDiedError, match="what waited for a word: its process died with exit code 3"):
        in_side_process(die, 60, "a word")
    with pytest.raises(DeadlineError, match="waited 0.2 s for a sleeper"):
        in_side_process(time.sleep, 0.2, "a sleeper", 1000)


SLEEPS = "import time; print('up', flush=True); time.sleep(1000)"
SESSION = "session_2026-01-02_03-04-05_678901_42"
Start = Callable[[RunMark], subprocess.Popen[str]]


@pytest.fixture(autouse=True)
def ray_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    return tmp_path / "ray"


@pytest.fixture
def start() -> Iterator[Start]:
    """A process that carries a mark."""
    started = []

    def run(mark: RunMark) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", SLEEPS],
            env={**os.environ, **mark.environment},
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


def living() -> ProcessId:
    found = ProcessId.of(os.getpid())
    assert found is not None
    return found


def dead() -> ProcessId:
    """A driver of this machine that had our process id once."""
    return ProcessId(living().host, living().pid, living().start_ticks - 1)


def found(tmp_path: Path, run: str) -> list[Leftover]:
    return [leftover for leftover in find_leftovers(runs=tmp_path / "runs") if leftover.run == run]


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
    orphan, other = start(RunMark("lost/1", dead())), start(RunMark("lost/2", dead()))
    leftovers = {leftover.id: leftover for leftover in found(tmp_path, "lost")}
    names = [f"process-{p.pid}-{p.start_ticks}" for p in map(ProcessId.of, (orphan.pid, other.pid)) if p]
    assert sorted(leftovers) == sorted(names)
    assert "time.sleep(1000)" in leftovers[names[0]].what
    assert [refusal for _, refusal in free([names[0]], list(leftovers.values()), timeout_s=5)] == [""]
    assert orphan.wait(5) != 0 and other.poll() is None
    assert [leftover.id for leftover in found(tmp_path, "lost")] == [names[1]]


def test_processes_of_living_and_of_far_drivers_are_left_alone(tmp_path: Path, start: Start) -> None:
    start(RunMark("lives/1", living()))
    start(RunMark("far/1", ProcessId("another machine", 1, 1)))
    assert found(tmp_path, "lives") == found(tmp_path, "far") == []


def test_an_id_that_names_nothing_ends_nothing(tmp_path: Path, start: Start) -> None:
    orphan = start(RunMark("lost/1", dead()))
    [leftover] = found(tmp_path, "lost")
    with pytest.raises(PreflightError, match="process-1-1: no leftover has this id"):
        list(free([leftover.id, "process-1-1"], [leftover], timeout_s=5))
    assert orphan.poll() is None


def test_a_session_of_a_dead_run_is_listed_once_and_removed_with_its_records(tmp_path: Path) -> None:
    record = write_session(tmp_path, RunMark("lost/0123456789abcdef", dead()))
    (tmp_path / "runs" / "latest").symlink_to("lost")
    [session] = found(tmp_path, "lost")
    assert (session.id, session.what) == ("session-0123456789ab", str(record.session_folder))
    assert [refusal for _, refusal in free([session.id], [session], timeout_s=5)] == [""]
    assert not any(path.exists() for path in record.paths) and not record.session_folder.exists()
    assert record.run_folder.is_dir(), "the run itself stays"
    assert found(tmp_path, "lost") == []


def test_a_session_that_is_still_used_stays(tmp_path: Path, start: Start) -> None:
    mark = RunMark("lost/1", dead())
    record = write_session(tmp_path, mark)
    orphan = start(mark)
    session = found(tmp_path, "lost")[-1]
    [(_, refusal)] = free([session.id], [session], timeout_s=5)
    assert f"still used by processes {orphan.pid}" in refusal
    assert all(path.exists() for path in record.paths)


def test_a_process_that_hides_its_environment_is_known_by_what_it_writes(tmp_path: Path) -> None:
    record = write_session(tmp_path, RunMark("lost/1", dead()))
    with (record.session_folder / "logs" / "agent.log").open("w") as log:
        agent = subprocess.Popen(  # as setproctitle leaves it
            [sys.executable, "-c", SLEEPS], env={}, stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        assert agent.stdout.readline() == "up\n"
        process, session = found(tmp_path, "lost")
        assert process.id.startswith(f"process-{agent.pid}-")
        [(_, refusal)] = free([session.id], [session], timeout_s=5)
        assert f"still used by processes {agent.pid}" in refusal
        assert [refusal for _, refusal in free([process.id], [process], timeout_s=5)] == [""]
        assert agent.wait(5) != 0
    finally:
        agent.kill()
        agent.wait()


def test_a_folder_that_is_no_session_is_not_removed(tmp_path: Path) -> None:
    record = write_session(tmp_path, RunMark("lost/1", dead()))
    (record.session_folder / "logs").rmdir()
    [session] = found(tmp_path, "lost")
    [(_, refusal)] = free([session.id], [session], timeout_s=5)
    assert "does not look like a Ray session folder" in refusal and record.session_folder.is_dir()


def test_the_record_of_the_run_that_goes_on_in_the_same_folder_stays(tmp_path: Path) -> None:
    old = write_session(tmp_path, RunMark("lost/1", dead()))
    new = RunRecord("lost", old.run_folder, RunMark("lost/2", living()), "127.0.0.1:2", "lost", None)
    new.write(old.run_folder / RECORD_FILE)
    [session] = found(tmp_path, "lost")
    assert [refusal for _, refusal in free([session.id], [session], timeout_s=5)] == [""]
    assert RunRecord.read(old.run_folder / RECORD_FILE) == new


def test_a_session_of_a_living_run_and_files_of_others_are_left_alone(tmp_path: Path) -> None:
    write_session(tmp_path, RunMark("lost/1", living()))
    other = tmp_path / "ray" / "session_2026-01-02_03-04-05_678901_43"
    other.mkdir()
    (other / SESSION_FILE).write_text("{}")
    assert [leftover for leftover in find_leftovers(runs=tmp_path / "runs") if "session" in leftover.id] == []
