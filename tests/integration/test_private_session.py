"""A private cluster: no other process reaches it, and it outlives a signal to the whole process group of its driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

DRIVER = """
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
        [sys.executable, "-c", DRIVER, str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
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
