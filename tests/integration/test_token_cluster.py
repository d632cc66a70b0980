"""Commands against clusters that ask for a token: a real head in token mode, and a private cluster of a run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from jobs import MOBULA, REPOSITORY, REWARD, SMALL
from ray_apart import START_S, dashboard_head, num_alive
from waiting import wait_until

from mobula.configs.overrides import overridden

REFUSED_S = 90.0  # most of it the import of a run's libraries on a busy machine; Ray alone would take 20 s longer
TOKEN = "f" * 64
RIGHT = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
WRONG = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
NONE = {"RAY_AUTH_MODE": "disabled"}
DRIVER = """
import sys
from mobula.deploy.host.session import ray_session
import ray
from mobula.configs.load import load_config

with ray_session(load_config(["experiment=digits", f"folder={sys.argv[1]}"])):
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
"""
pytestmark = [pytest.mark.matrix, pytest.mark.timeout(1800)]


@dataclass(frozen=True)
class Guarded:
    """A head that asks for `TOKEN`."""

    address: str  # of the control store
    dashboard: str
    folder: Path  # for what runs write


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with dashboard_head(num_cpus=4, store_bytes=300_000_000, **RIGHT) as head:
        wait_until(
            lambda: num_alive(head.dashboard, Authorization=f"Bearer {TOKEN}"), START_S, lambda: "the node of the head"
        )
        yield Guarded(head.address, head.dashboard, tmp_path_factory.mktemp("shared"))


def environment(auth: Mapping[str, str]) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_AUTH_")}
    return {**kept, "RAY_USAGE_STATS_ENABLED": "0", **auth}


def started(auth: Mapping[str, str], *words: str, **pipes: Any) -> subprocess.Popen[str]:
    """Python with these words, in the repository."""
    command = [sys.executable, *words]
    return subprocess.Popen(command, cwd=REPOSITORY, env=environment(auth), text=True, **pipes)


def mobula(auth: Mapping[str, str], *words: str, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *MOBULA, *words]
    env = environment(auth)
    return subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=timeout_s)


def is_refused(auth: Mapping[str, str], reason: str, *words: str) -> None:
    """It ends in time, with one message and without a traceback."""
    done = mobula(auth, *words, timeout_s=REFUSED_S)
    assert done.returncode == 2, (words, done.stdout, done.stderr)
    assert reason in done.stderr and "Traceback" not in done.stderr, (words, done.stderr)
    assert done.stderr.count("mobula:") == 1 and TOKEN not in done.stderr


@pytest.mark.parametrize(
    ("auth", "reason"),
    [(NONE, "asks for a token, and RAY_AUTH_MODE is disabled: set RAY_AUTH_MODE=token"), (WRONG, "refuses the token")],
    ids=["without-a-token", "with-another-token"],
)
def test_every_command_is_refused(cluster: Guarded, auth: Mapping[str, str], reason: str) -> None:
    folder, at = cluster.folder / "refused", f"resources.address={cluster.address}"
    is_refused(auth, reason, "status", "guarded", "--address", cluster.address)
    is_refused(auth, reason, "scale", "reward=2", "guarded", "--address", cluster.address)
    is_refused(auth, reason, "train", "experiment=digits", at, f"folder={folder}", f"data.path={folder / 'data'}")
    is_refused(auth, reason, "plan", "experiment=digits", "--address", cluster.address)
    is_refused(auth, reason, "doctor", "experiment=digits", "--address", cluster.address)
    is_refused(auth, reason, "doctor", "--leftovers", "--address", cluster.address)
    is_refused(auth, reason, "list", "--address", cluster.dashboard)
    assert not folder.exists(), "refused before data are prepared"


def test_with_the_token_a_run_trains_is_asked_and_scaled(cluster: Guarded) -> None:
    folder = cluster.folder
    (folder / "job_reward.py").write_text(REWARD)
    (folder / "token").write_text(TOKEN)
    from_file = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
    words = ["experiment=digits", "name=guarded", "num_steps=500", f"resources.address={cluster.address}"]
    words += [f"folder={folder / 'runs'}", f"data.path={folder / 'data'}", f"policy.model={folder / 'model'}"]
    words = overridden(SMALL, [*words, f"rewards.components.0.function={folder / 'job_reward.py'}:score"])
    with (folder / "output.txt").open("w") as output:
        run = started(from_file, *MOBULA, "train", *words, stdout=output, stderr=subprocess.STDOUT)
    steps = folder / "runs" / "guarded" / "metrics.jsonl"
    place = ["guarded", "--address", cluster.address]
    try:
        wait_until(
            lambda: steps.is_file() and '"kind": "step"' in steps.read_text() or run.poll() is not None,
            900,
            lambda: (folder / "output.txt").read_text(),
        )
        assert run.poll() is None, (folder / "output.txt").read_text()
        is_refused(WRONG, "refuses the token", "scale", "reward=2", *place)
        token = {"RAY_AUTH_TOKEN": TOKEN}
        done = mobula(token, "scale", "reward=2", *place, "--auth", "token", "--timeout", "120")
        assert done.returncode == 0 and "reward=2 accepted" in done.stdout, done.stdout + done.stderr
        deadline = time.monotonic() + 240
        while "reward/1" not in (done := mobula(RIGHT, "status", *place, "--timeout", "120")).stdout:
            assert done.returncode == 0 and time.monotonic() < deadline, done.stdout + done.stderr
        by_folder = mobula(RIGHT, "status", "--run", str(folder / "runs" / "guarded"), "--timeout", "120")
        assert by_folder.returncode == 0, by_folder.stderr
    finally:
        run.terminate()
        run.wait(300)


def test_a_private_cluster_admits_the_token_alone(tmp_path: Path) -> None:
    pipe = subprocess.PIPE
    driver = started(RIGHT, "-c", DRIVER, str(tmp_path), stdin=pipe, stdout=pipe)
    try:
        address = driver.stdout.readline().strip()
        is_refused(NONE, "asks for a token", "status", "any", "--address", address)
        is_refused(WRONG, "refuses the token", "status", "any", "--address", address)
        done = mobula(RIGHT, "status", "any", "--address", address)
        assert done.returncode == 1 and "has no run of this name" in done.stderr
    finally:
        driver.communicate(timeout=120)
