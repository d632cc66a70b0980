"""A worker's sign of life holds what its process uses, and which rate its engine has."""

from __future__ import annotations

import time

import pytest

from mobula.cluster.runtime.usage import GpuReading, VitalsMeter
from mobula.cluster.runtime.vitals import EngineLoad


class Gpus:
    """GPUs that are not there."""

    def __init__(self, *utilizations: float | None) -> None:
        self._utilizations = utilizations

    def read(self) -> list[GpuReading]:
        return [GpuReading("gpu", 100.0, 25.0, used) for used in self._utilizations]

    def close(self) -> None: ...


def test_a_busy_thread_is_seen_and_an_idle_one_is_not() -> None:
    meter = VitalsMeter("10.0.0.1", 1, Gpus())
    until, used = time.thread_time() + 0.3, 0
    while time.thread_time() < until:
        used += 1
    busy = meter.read(None)
    time.sleep(0.3)
    idle = meter.read(None)
    assert busy.busy_share is not None and idle.busy_share is not None and idle.busy_share < 0.5 * busy.busy_share
    assert busy.node == "10.0.0.1" and busy.rss_bytes is not None and busy.rss_bytes > 10 * 2**20
    assert (busy.gpu_bytes, busy.gpu_busy_share, busy.load, busy.tokens_per_s) == (None, None, None, None)


def test_gpus_are_added_up_and_their_use_is_averaged() -> None:
    found = VitalsMeter("10.0.0.1", 1, Gpus(80.0, 40.0)).read(None)
    assert found.gpu_bytes == 50 * 2**20 and found.gpu_busy_share == pytest.approx(0.6)
    unknown = VitalsMeter("10.0.0.1", 1, Gpus(None)).read(None)  # a driver that does not report it
    assert (unknown.gpu_bytes, unknown.gpu_busy_share) == (25 * 2**20, None)


def test_the_rate_is_that_since_the_sign_before() -> None:
    meter = VitalsMeter("10.0.0.1", 1, Gpus())
    meter.read(EngineLoad(0.0, 0, 0, 0, num_tokens=1000))
    start = time.monotonic()
    time.sleep(0.2)
    found = meter.read(EngineLoad(0.5, 4, 1, 0, num_tokens=1600))
    assert found.tokens_per_s is not None and 600 / (time.monotonic() - start + 0.1) < found.tokens_per_s <= 600 / 0.2
    assert found.load is not None and found.load.kv_usage == 0.5
    assert meter.read(EngineLoad(0.5, 4, 1, 0, num_tokens=1600)).tokens_per_s == 0.0
