"""Jobs on a Ray cluster that was started apart: a head with the dashboard, and a second raylet."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from jobs import MOBULA, REPOSITORY, REWARD, SMALL, steps_of
from ray_apart import ENVIRONMENT, START_S, dashboard_head, free_port, num_alive, python, start_command, start_words
from typer.testing import CliRunner
from waiting import wait_until

from mobula.deploy.cli import app
from mobula.deploy.jobs.client import STOPPED, Jobs

pytestmark = [pytest.mark.timeout(900)]

IN_ORDER = """
import pathlib, signal, sys, time
def end(*_):
    time.sleep(4)  # longer than Ray waits by itself
    pathlib.Path({marker!r}).write_text("closed")
    sys.exit(130)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(600)
"""
LOOK = """
import sys, ray
from mobula.deploy.run.node_network import missing_on
ray.init()
nodes = [node for node in ray.nodes() if node["Alive"]]
missing = missing_on(nodes, {"folder": sys.argv[1], "data.path": "/no/such/path"})
assert all(keys == ["data.path"] for keys in missing.values()), missing
print("nodes", len(nodes))
"""


@dataclass(frozen=True)
class Apart:
    """A cluster that no test started from within."""

    dashboard: str
    address: str  # of the control store
    folder: Path  # for what jobs write

    def jobs(self) -> Jobs:
        return Jobs(self.dashboard, "disabled")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    with dashboard_head(num_cpus=1) as head:
        wait_until(lambda: num_alive(head.dashboard) == 1, START_S, lambda: "the dashboard of the head")
        ports = (f"--dashboard-agent-listen-port={free_port()}", f"--metrics-export-port={free_port()}")
        # In one session folder the second raylet would unpack a job's working folder over that of the first.
        folder = f"--temp-dir={head.sessions / 'b'}"
        own = (f"--address={head.address}", "--node-ip-address=127.0.0.1", *ports, "--num-cpus=2", folder)
        head.processes.append(start_command(start_words(*own)))
        wait_until(lambda: num_alive(head.dashboard) == 2, START_S, lambda: "two nodes")
        yield Apart(head.dashboard, head.address, tmp_path_factory.mktemp("shared"))


def command(*words: str) -> tuple[int, str]:
    """`mobula` with these words in a process of its own: exit code and output."""
    return python(*MOBULA, *words, timeout_s=900)


def test_a_job_ends_with_its_own_code_and_is_listed(cluster: Apart) -> None:
    jobs = cluster.jobs()
    for name, code in (("good", 0), ("bad", 3)):
        jobs.submit(name, f'{sys.executable} -c "print(40 + 2); raise SystemExit({code})"', {}, {"run": name})
    for name, code in (("good", 0), ("bad", 3)):
        written: list[str] = []
        assert jobs.follow(name, written.append) == code
        assert "42" in "".join(written)
    assert {job.submission_id: job.run for job in jobs.all()} == {"good": "good", "bad": "bad"}
    result = CliRunner().invoke(app, ["list", "--address", cluster.dashboard])
    assert result.exit_code == 0 and "succeeded" in result.stdout and "failed" in result.stdout
    shown = CliRunner().invoke(app, ["logs", "good", "--address", cluster.dashboard])
    assert shown.exit_code == 0
    missing = CliRunner().invoke(app, ["logs", "nothing", "--address", cluster.dashboard])
    assert missing.exit_code == 2 and "there is no job nothing" in missing.stderr


def test_a_stopped_job_has_the_time_to_end_in_order(cluster: Apart) -> None:
    jobs, marker = cluster.jobs(), cluster.folder / "closed"
    script = cluster.folder / "in_order.py"
    script.write_text(IN_ORDER.format(marker=str(marker)))
    env = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}}
    jobs.submit("slow", f"{sys.executable} {script}", env, {"run": "slow"})
    jobs.wait_until_started("slow", START_S)
    wait_until(lambda: "ready" in jobs.logs("slow"), START_S, lambda: jobs.logs("slow"))
    assert jobs.stop("slow", START_S) == STOPPED
    assert marker.read_text() == "closed"


def test_the_doctor_looks_at_every_node(cluster: Apart) -> None:
    words = [f"folder={cluster.folder}", "data.path=/no/such/data", f"policy.model={cluster.folder}"]
    code, output = command("doctor", "--address", cluster.address, "experiment=digits", *words)
    assert code == 1, output
    for title in ("versions", "GPUs", "network", "clock", "disk"):
        assert output.count(f"): {title}: ") == 2, output
    assert output.count("paths: does not see data.path") == 2


def test_paths_are_looked_for_on_every_node(cluster: Apart) -> None:
    jobs = cluster.jobs()
    script = cluster.folder / "look.py"
    script.write_text(LOOK)
    env = {"env_vars": {"PYTHONPATH": str(REPOSITORY), **ENVIRONMENT}}
    jobs.submit("look", f"{sys.executable} {script} {cluster.folder}", env, {})
    written: list[str] = []
    assert jobs.follow("look", written.append) == 0, "".join(written)
    assert "nodes 2" in "".join(written)


@pytest.mark.matrix
@pytest.mark.timeout(1800)
def test_a_submitted_run_is_stopped_and_goes_on_when_it_is_sent_again(cluster: Apart) -> None:
    """The digits job on both raylets: `ray job submit` packs the working folder, so nothing has to be installed."""
    folder, at = cluster.folder, ("--address", cluster.dashboard)
    (folder / "job_reward.py").write_text(REWARD)
    run = folder / "runs" / "sent"
    words = [
        "experiment=digits", "name=sent", f"folder={folder / 'runs'}", f"data.path={folder / 'data'}",
        f"policy.model={folder / 'model'}", "num_steps=1000", *SMALL,
    ]  # fmt: skip
    options = ["--working-dir", str(REPOSITORY), "--env", f"PYTHONPATH={folder}", "--no-follow"]
    code, output = command("submit", *words, *options, *at)
    assert code == 0 and "job sent submitted" in output, output
    wait_until(lambda: len(steps_of(run)) >= 2, 900, lambda: cluster.jobs().logs("sent"))
    code, output = command("stop", "sent", "--timeout", "300", *at)
    assert code == 0 and "stopped" in output, output
    reached = len(steps_of(run))
    assert (run / "summary.json").is_file() and (run / "report.html").is_file()
    again = [word if word != "num_steps=1000" else f"num_steps={reached + 1}" for word in words]
    code, output = command("submit", *again, *options[:-1], "--follow", *at)
    assert code == 0, output
    assert "job sent-2 submitted" in output and len(steps_of(run)) == reached + 1
