"""Run folder: one process at a time writes into it, with the modes of `folder_access`."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from waiting import wait_until

from mobula.cluster.errors import PreflightError
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.deploy.host import run_folder as folders
from mobula.deploy.host.processes import ProcessId
from mobula.deploy.report.diagnose import command
from mobula.deploy.training_service.store import Database, Session

OTHER = replace(folders.Holder.of_this_process(), token="other", machine="elsewhere/1/2", job="Slurm job 7")

HOLDS = """
import sys, time
from pathlib import Path
from mobula.deploy.host.run_folder import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def leave(folder: Path, holder: folders.Holder) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / folders.LOCK_FILE
    path.write_text(json.dumps(asdict(holder)))
    return path


def test_a_second_start_names_the_holder_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    folder = tmp_path / "runs" / "one"
    with folders.run_lock(folder):
        before = (folder.stat().st_mtime_ns, (folder / folders.LOCK_FILE).read_bytes())
        holder = rf"process {os.getpid()} on .* \(Slurm job 42\) since .*: stop it with `scancel 42` on"
        with pytest.raises(PreflightError, match=holder):
            with folders.run_lock(folder):
                raise AssertionError("two hold it")
        assert (folder.stat().st_mtime_ns, (folder / folders.LOCK_FILE).read_bytes()) == before
    assert not (tmp_path / "runs").exists(), "a folder that was made for the lock and stayed empty"


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(PreflightError, match=f"process {process.pid} on"), folders.run_lock(tmp_path):
            pass
        process.kill()
        process.wait()
        with folders.run_lock(tmp_path):
            assert json.loads((tmp_path / folders.LOCK_FILE).read_text())["process"] == str(ProcessId.of(os.getpid()))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{}", "[1]", "no JSON"])
def test_a_lock_that_names_no_process_is_taken_over(tmp_path: Path, text: str) -> None:
    (tmp_path / folders.LOCK_FILE).write_text(text)
    with folders.run_lock(tmp_path, watch_s=0.2):
        assert json.loads((tmp_path / folders.LOCK_FILE).read_text())["token"]


def test_the_silent_holder_of_another_machine_is_dead_and_one_that_beats_is_not(tmp_path: Path) -> None:
    path, done = leave(tmp_path, OTHER), threading.Event()
    os.utime(path, (0, 0))  # a clock that is years behind

    def beat() -> None:
        while not done.wait(0.05):
            os.utime(path, (0, time.monotonic()))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with (
            pytest.raises(PreflightError, match=r"in use by process .* \(Slurm job 7\)"),
            folders.run_lock(tmp_path, watch_s=5),
        ):
            pass
    finally:
        done.set()
        thread.join()
    with folders.run_lock(tmp_path, watch_s=0.2):
        assert json.loads(path.read_text())["token"] != "other"


def test_of_several_that_take_over_one_lock_one_holds_it(tmp_path: Path) -> None:
    leave(tmp_path, OTHER)
    outcomes: list[str] = []

    def take() -> None:
        try:
            with folders.run_lock(tmp_path, watch_s=0.2):
                outcomes.append("held")
                time.sleep(3.0)
        except PreflightError:
            outcomes.append("refused")

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["held", *["refused"] * 5]


def test_a_holder_whose_lock_was_taken_stops_and_leaves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "BEAT_S", 0.05)
    stopped = threading.Event()
    with folders.run_lock(tmp_path, stop=stopped.set):
        leave(tmp_path, OTHER)
        wait_until(stopped.is_set)
    assert json.loads((tmp_path / folders.LOCK_FILE).read_text())["token"] == "other"


def test_the_holder_gives_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "BEAT_S", 0.05)
    with folders.run_lock(tmp_path):
        before = (tmp_path / folders.LOCK_FILE).stat().st_mtime_ns
        wait_until(lambda: (tmp_path / folders.LOCK_FILE).stat().st_mtime_ns > before)


def test_a_job_of_ray_is_named_by_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"metadata": {"job_submission_id": "digits-2"}}))
    assert folders.Holder.of_this_process().job == "job digits-2"


def record(tmp_path: Path, *, is_private: bool = True) -> folders.RunRecord:
    (tmp_path / "digits").mkdir()
    (tmp_path / "session").mkdir()
    mark = folders.RunMark("digits/0123", ProcessId("here", 12, 34))
    folder = tmp_path / "session" if is_private else None
    return folders.RunRecord("digits", tmp_path / "digits", mark, "10.0.0.1:6379", "digits", folder)


def test_children_carry_the_mark_and_it_ends_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(folders.RUN_VARIABLE, "an outer run's")
    monkeypatch.delenv(folders.DRIVER_VARIABLE, raising=False)
    with folders.marking("digits") as mark:
        names = (folders.RUN_VARIABLE, folders.DRIVER_VARIABLE)
        program = f"import os; print(*(os.environ[name] for name in {names}))"
        child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert folders.RunMark.of(dict(zip(names, child.stdout.split(), strict=True))) == mark
    assert mark.run_id.startswith("digits/") and mark.driver == ProcessId.of(os.getpid())
    assert os.environ[folders.RUN_VARIABLE] == "an outer run's" and folders.DRIVER_VARIABLE not in os.environ


def test_two_runs_of_one_name_differ_and_nested_marks_of_one_run_do_not() -> None:
    with folders.marking("digits") as first, folders.marking("digits") as inner, folders.marking("sums") as other:
        assert first == inner != other
    with folders.marking("digits") as second:
        assert first != second


@pytest.mark.parametrize("is_private", [True, False])
def test_the_record_lies_in_the_run_folder_while_the_run_goes_on(tmp_path: Path, is_private: bool) -> None:
    written = record(tmp_path, is_private=is_private)
    with pytest.raises(KeyError), folders.recorded(written):
        assert folders.RunRecord.read(tmp_path / "digits" / folders.RECORD_FILE) == written
        assert (tmp_path / "session" / folders.SESSION_FILE).exists() == is_private
        raise KeyError("the run failed")
    assert list((tmp_path / "digits").iterdir()) == list((tmp_path / "session").iterdir()) == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"run": "digits", "session_folder": null}'])
def test_what_is_no_record_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / folders.RECORD_FILE).write_text(text)
    with pytest.raises(ValueError, match="cluster.json is no record of a run"):
        folders.RunRecord.read(tmp_path / folders.RECORD_FILE)


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def config_of(folder: Path, *words: str) -> RunConfig:
    return load_config(["experiment=digits", f"folder={folder / 'runs'}", "name=a", *words])


def modes(folder: Path) -> set[str]:
    """Kind and mode of the folder and of all below it."""
    paths = (folder, *folder.rglob("*"))
    return {f"{'d' if p.is_dir() else '-'}{stat.S_IMODE(p.lstat().st_mode):o}" for p in paths if not p.is_symlink()}


def fill(folder: Path) -> None:
    """Files as a process with the usual umask makes them."""
    (folder / "checkpoints" / "step").mkdir(parents=True, exist_ok=True)
    for name in ("run.log", "checkpoints/step/model.safetensors"):
        (folder / name).write_text("x")


@pytest.mark.parametrize(("access", "expected"), [("owner", {"d700", "-600"}), ("group", {"d750", "-640"})])
def test_modes_follow_the_key(tmp_path: Path, access: str, expected: set[str]) -> None:
    config = config_of(tmp_path, f"folder_access={access}")
    fill(config.run_folder)
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (config.run_folder / "link").symlink_to(outside)
    assert modes(config.run_folder) == {"d755", "-644"}
    with folders.held_run_folder(config):
        folders.make_run_folder(config)
        fill(config.run_folder / "more")
        assert modes(config.run_folder) == expected
    assert os.umask(0o022) == 0o022, "the caller's is restored"
    assert stat.S_IMODE(outside.stat().st_mode) == 0o644, "links are not followed"
    closed = config_of(tmp_path, "folder_access=owner")
    with folders.held_run_folder(closed):
        assert modes(config.run_folder) == {"d700", "-600"}


def test_a_new_run_is_closed_with_its_parents(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with folders.held_run_folder(config):
        folders.make_run_folder(config)
    assert modes(config.folder) == {"d700", "-600"}


async def test_servers_change_the_folders_of_earlier_parts(tmp_path: Path) -> None:
    fill(tmp_path / "service")
    config = config_of(tmp_path)
    with folders.file_access(config, tmp_path / "service", tmp_path / "not there yet"):
        database = Database(tmp_path / "service" / "new" / "service.sqlite")
        await database.all(Session)
        await database.close()
        assert modes(tmp_path / "service") == {"d700", "-600"}


def test_a_foreign_temporary_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "gettempdir", lambda: str(tmp_path))
    subject = command.subject_of(["experiment=digits", "name=a"], None)
    made = command.pictures_folder(subject)
    assert modes(made) == {"d700"}
    made.rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    made.symlink_to(elsewhere)
    with pytest.raises(PreflightError, match="of another user"):
        command.pictures_folder(subject)
