"""Ray nodes that are started as an administrator does, apart from any run, and ended by their process groups."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from waiting import wait_until

REPOSITORY = Path(__file__).parents[2]

ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}

START_S, END_S = 240.0, 30
Start = Callable[..., subprocess.Popen[bytes]]  # words of `ray start` -> the node

COUNT = """
import sys, ray
ray.init(sys.argv[1], log_to_driver=False)
print("nodes", sum(node["Alive"] for node in ray.nodes()))
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start_words(*words: str, store_bytes: int = 100_000_000) -> list[str]:
    """`ray start` with these words, in the foreground."""
    ray = str(Path(sys.executable).with_name("ray"))
    return [ray, "start", "--block", "--disable-usage-stats", f"--object-store-memory={store_bytes}", *words]


@dataclass(frozen=True)
class Head:
    """A head with its dashboard on the loopback."""

    address: str  # of the control store
    dashboard: str
    sessions: Path
    processes: list[subprocess.Popen[bytes]]  # what is appended ends with the head


@contextmanager
def dashboard_head(num_cpus: int, *, store_bytes: int = 100_000_000, **env: str) -> Iterator[Head]:
    sessions = Path(tempfile.mkdtemp(prefix="mh", dir="/tmp"))  # sockets below it have short names
    port, http, agent, metrics = (free_port() for _ in range(4))
    words = (
        "--head", "--node-ip-address=127.0.0.1", f"--port={port}", f"--num-cpus={num_cpus}", f"--temp-dir={sessions}",
        "--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={http}",
        f"--dashboard-agent-listen-port={agent}", f"--metrics-export-port={metrics}",
    )  # fmt: skip
    processes = [start_command(start_words(*words, store_bytes=store_bytes), **env)]
    try:
        yield Head(f"127.0.0.1:{port}", f"http://127.0.0.1:{http}", sessions, processes)
    finally:
        end_all(processes)
        shutil.rmtree(sessions, ignore_errors=True)


def start_command(command: list[str], **env: str) -> subprocess.Popen[bytes]:
    """Any command that ends up in `ray start --block`."""
    return subprocess.Popen(
        command,
        env={**os.environ, **ENVIRONMENT, **env},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def raylet(devices: str, label: str, *words: str) -> subprocess.Popen[bytes]:
    """A node on this machine with the GPUs `devices`, of which none has to be there: Ray counts `--num-gpus`."""
    ports = (f"--dashboard-agent-listen-port={free_port()}", f"--metrics-export-port={free_port()}")
    own = ("--node-ip-address=127.0.0.1", *ports, f"--labels=devices={label}")
    return start_command(start_words(*own, *words), CUDA_VISIBLE_DEVICES=devices)


def python(*words: str, timeout_s: float = 300.0) -> tuple[int, str]:
    """The exit code and the output of Python, as a driver of these nodes."""
    env, command = {**os.environ, **ENVIRONMENT}, [sys.executable, *words]
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=timeout_s)
    return done.returncode, done.stdout + done.stderr


def num_nodes(address: str) -> int:
    _, printed = python("-c", COUNT, address)
    return int(printed.rpartition("nodes ")[2].split()[0]) if "nodes " in printed else 0


def num_alive(dashboard: str, **headers: str) -> int:
    """Nodes as the dashboard of a head shows them."""
    request = urllib.request.Request(f"{dashboard}/nodes?view=summary", headers=headers)
    with suppress(OSError), urllib.request.urlopen(request, timeout=5) as answer:
        return sum(node["raylet"].get("state") == "ALIVE" for node in json.load(answer)["data"]["summary"])
    return 0


@contextmanager
def two_nodes(head: Start, other: Start, address: str, num_nodes: Callable[[str], int] = num_nodes) -> Iterator[str]:
    """The address of a cluster of two nodes, which these start, the other one once the head is there."""
    sessions = Path(tempfile.mkdtemp(prefix="mh", dir="/tmp"))  # sockets below it have short names
    port = address.rpartition(":")[2]
    processes = [head("--head", f"--port={port}", f"--temp-dir={sessions}", "--include-dashboard=false")]
    try:
        wait_until(lambda: num_nodes(address) == 1, START_S, lambda: "the head")
        processes.append(other(f"--address={address}"))
        wait_until(lambda: num_nodes(address) == 2, START_S, lambda: "two nodes")
        yield address
    finally:
        end_all(processes)
        shutil.rmtree(sessions, ignore_errors=True)


def end_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End these process groups, the newest first."""
    for process in reversed(processes):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    for process in processes:
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


SUBNET = "10.77.31"

HOSTS = Path("/etc/netns")  # what `ip netns exec` shows as /etc


@dataclass(frozen=True)
class Host:
    """One namespace."""

    name: str
    address: str

    def command(self, *words: str) -> list[str]:
        """These words as a command of this host."""
        return ["ip", "netns", "exec", self.name, *words]


def reason_against() -> str | None:
    """Why no namespaces can be made here."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "no `ip` here (Debian: iproute2)"
    probe = f"mobula-{uuid.uuid4().hex[:6]}"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if done.returncode != 0:
        return f"no network namespace can be made: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return None


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts with a cable between them and no other network."""
    mark = uuid.uuid4().hex[:6]
    hosts = tuple(Host(f"mobula-{mark}-{n}", f"{SUBNET}.{n}") for n in (1, 2))
    cable = [f"mb{mark}{n}" for n in (1, 2)]
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
            _write_hosts(host)
        _ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for host, end in zip(hosts, cable, strict=True):
            _ip("link", "set", end, "netns", host.name)
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", end)
            for name in (end, "lo"):
                _ip("-n", host.name, "link", "set", name, "up")
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)
            shutil.rmtree(HOSTS / host.name, ignore_errors=True)


def _write_hosts(host: Host) -> None:
    folder = HOSTS / host.name
    folder.mkdir(parents=True)
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
