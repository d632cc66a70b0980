"""Two hosts made of network namespaces: an interface each, and a name that resolves to 127.0.1.1 as on Debian."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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
