"""Only what dead runs left is listed, each thing under an id of its own, and only what was named is ended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mobula.cluster.errors import PreflightError
from mobula.deploy.host.processes import ProcessId
from mobula.deploy.host.run_folder import RECORD_FILE, SESSION_FILE, RunMark, RunRecord
from mobula.deploy.run.run_client import Leftover, find_leftovers, free

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
