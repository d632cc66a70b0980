"""A run is found by name, folder or cluster; one that is over, dead or silent is reported so in time."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_records import go_on

from mobula.cluster.errors import DeadlineError, PlacementError, PreflightError, RunOverError, WorkerDiedError
from mobula.deploy.host.processes import in_side_process
from mobula.deploy.host.run_folder import RECORD_FILE
from mobula.deploy.run import run_client
from mobula.deploy.run.run_client import RunAddress, find_run, read_status


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`runs` in the working folder of the caller."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "digits").mkdir(parents=True)
    (tmp_path / "runs" / "latest").symlink_to("digits")
    return tmp_path / "runs"


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
