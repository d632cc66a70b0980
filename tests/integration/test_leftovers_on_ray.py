"""What a killed run leaves behind is found and ended by id, also a child that left its session and its parents."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import ray
from jobs import GONE_DEADLINE_S, REPOSITORY
from typer.testing import CliRunner
from waiting import wait_until

from mobula.cluster.runtime.placement_groups import groups_of_dead_drivers, remove_group
from mobula.deploy.cli import app
from mobula.deploy.host.processes import ProcessId
from mobula.deploy.run.run_client import Leftover, find_leftovers, free

DRIVER = """
import subprocess, sys
from pathlib import Path

from mobula.deploy.host.session import ray_session, run_record  # isort: skip
import ray

from mobula.configs.load import load_config
from mobula.deploy.host.run_folder import recorded

ORPHAN = (
    "import subprocess; silent = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL);"
    "print(subprocess.Popen(['sleep', '1000'], start_new_session=True, **silent).pid)"
)


@ray.remote(num_cpus=0)
class Careless:
    def leave(self):
        made = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, check=True)
        return int(made.stdout)


def main(folder):
    config = load_config(["experiment=digits", f"folder={folder}", "name=killed", "resources.num_cpus=1",
                          "resources.dashboard=false", "resources.object_store_bytes=104857600"])
    config.run_folder.mkdir(parents=True)
    with ray_session(config) as session, recorded(run_record(config, session)):
        careless = Careless.remote()
        print("left", ray.get(careless.leave.remote(), timeout=120), flush=True)
        sys.stdin.read()


main(sys.argv[1])
"""


@pytest.fixture
def ray_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Directly below /tmp: a Unix socket's path may have 107 characters at most."""
    folder = Path(tempfile.mkdtemp(prefix="mobula-", dir="/tmp"))
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield folder / "ray"
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def killed(tmp_path: Path, ray_folder: Path) -> Iterator[ProcessId]:
    """A run whose driver was killed; its orphan."""
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path / "runs")],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    orphan = None
    try:
        line = next(line for line in driver.stdout if line.startswith("left "))
        orphan = ProcessId.of(int(line.split()[1]))
        assert orphan is not None
        assert of_run("killed", tmp_path) == [], "a run that goes on leaves nothing"
        driver.kill()
        driver.wait(30)
        yield orphan
    finally:
        driver.kill()
        for leftover in of_run("killed", tmp_path):
            leftover.free(10)
        if orphan is not None and orphan.is_alive:
            with suppress(ProcessLookupError):
                os.kill(orphan.pid, signal.SIGKILL)


def of_run(run: str, tmp_path: Path) -> list[Leftover]:
    """Processes first, then the session that they use."""
    return [leftover for leftover in find_leftovers(runs=tmp_path / "runs") if leftover.run == run]


def is_agent(leftover: Leftover) -> bool:
    """Ray's agents outlive its other processes by a minute at most, in which they look for the control store."""
    return leftover.what.startswith("ray::")


@pytest.mark.timeout(400)
def test_an_orphan_in_its_own_session_is_found_and_ended(killed: ProcessId, tmp_path: Path, ray_folder: Path) -> None:
    orphan_id = f"process-{killed.pid}-{killed.start_ticks}"
    wait_until(
        lambda: [found.id for found in of_run("killed", tmp_path) if not is_agent(found)][:-1] == [orphan_id],
        GONE_DEADLINE_S,
        lambda: of_run("killed", tmp_path),
    )
    for agent in filter(is_agent, of_run("killed", tmp_path)):
        agent.free(1)
    process, session = of_run("killed", tmp_path)
    assert process.what == "sleep 1000"
    assert Path(session.what).parent == ray_folder and Path(session.what).is_dir()

    [(_, refusal)] = free([session.id], [session], timeout_s=5)
    assert f"used by processes {killed.pid}:" in refusal
    assert Path(session.what).is_dir(), "what is still used is not taken away"

    listed = CliRunner().invoke(app, ["doctor", "--leftovers"])
    assert (listed.exit_code, process.id in listed.stdout, session.id in listed.stdout) == (0, True, True)
    freed = CliRunner().invoke(app, ["doctor", "--free", process.id, session.id])
    assert freed.exit_code == 0, freed.output
    assert f"{process.id}: freed" in freed.stdout and f"{session.id}: freed" in freed.stdout
    assert not killed.is_alive
    assert not Path(session.what).exists() and not (tmp_path / "runs" / "killed" / "cluster.json").exists()
    assert of_run("killed", tmp_path) == []

    again = CliRunner().invoke(app, ["doctor", "--free", process.id])
    assert again.exit_code == 2 and "no leftover has this id" in again.stderr


FORGETFUL = """
import sys
import mobula.deploy.host.ray_defaults
import ray

ray.init(address=sys.argv[1], namespace="gone", log_to_driver=False)
group = ray.util.placement_group([{"CPU": 0.1}], name=sys.argv[2], lifetime="detached")
assert group.wait(60)
"""


def test_placement_groups_of_dead_drivers_alone_are_leftovers(local_ray: str) -> None:
    """Ray removes a dead driver's groups itself; a detached one stands for one that it forgot."""
    address = ray.get_runtime_context().gcs_address
    living = ray.util.placement_group([{"CPU": 0.1}], name="living/reward/0/0123abcd")
    for name in ("gone/reward/0/0123abcd", "another program's"):
        subprocess.run([sys.executable, "-c", FORGETFUL, address, name], cwd=REPOSITORY, check=True, timeout=120)
    assert living.wait(30)
    wait_until(lambda: len(groups_of_dead_drivers()) == 2, 30, groups_of_dead_drivers)

    [found] = [leftover for leftover in find_leftovers(address=address) if leftover.id.startswith("group-")]
    assert (found.run, found.what) == ("gone", "what was reserved for reward/0")
    assert [refusal for _, refusal in free([found.id], [found], timeout_s=5)] == [""]
    wait_until(
        lambda: [name for _, name in groups_of_dead_drivers()] == ["another program's"], 30, groups_of_dead_drivers
    )
    for group_id, _ in groups_of_dead_drivers():
        remove_group(group_id)
    ray.util.remove_placement_group(living)


PRIVATE_DRIVER = """
import signal, sys, threading
from mobula.deploy.host.session import ray_session
import ray
from mobula.configs.load import load_config

stopped = threading.Event()
with ray_session(load_config(["experiment=digits", f"folder={sys.argv[1]}"])):
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())  # Ray has set one as well
    print("ready", flush=True)
    stopped.wait(60)
    print("stopped by a signal:", stopped.is_set(), "answer:", ray.get(ray.remote(lambda: 6 * 7).remote(), timeout=60))
"""

LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", PRIVATE_DRIVER, str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()


def test_its_processes_listen_on_the_loopback_address_alone(driver: subprocess.Popen[str]) -> None:
    listening = {
        (process.name(), socket.laddr.ip)
        for process in psutil.Process(driver.pid).children(recursive=True)
        for socket in process.net_connections("inet")
        if socket.status == psutil.CONN_LISTEN
    }
    assert {"gcs_server", "raylet"} <= {name for name, _ in listening}
    assert {ip for _, ip in listening} <= LOOPBACK


def test_the_driver_can_end_in_order_when_its_whole_process_group_is_signalled(driver: subprocess.Popen[str]) -> None:
    os.killpg(driver.pid, signal.SIGTERM)
    printed, _ = driver.communicate(timeout=120)
    assert printed == "stopped by a signal: True answer: 42\n"
    assert driver.returncode == 0
