"""Members of a transfer group over gloo or shared memory that die or hang: the others leave in time and meet again."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from transfer_members import (
    Member,
    Transfers,
    members,
    names_who_is_missing,
    survives_a_death_before_the_first_byte,
    survives_a_hang,
    survives_a_kill,
    survives_a_kill_of_the_sender,
)

TIMEOUT_S = 5.0


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture(scope="module", params=["memory", pytest.param("network", marks=pytest.mark.exhaustive)])
def same_host(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def receivers(same_host: str) -> Iterator[list[Member]]:
    """Once they are dead, nothing is left of the memory that they shared."""
    files, before = set(Path("/dev/shm").glob("*mobula*")), _num_mapped()  # by groups that other tests left open
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("GLOO_SOCKET_IFNAME", "lo")
        with members("cpu", "cpu", "cpu", "cpu") as started:
            yield started
    deadline = time.monotonic() + TIMEOUT_S
    while _num_mapped() > before and time.monotonic() < deadline:  # it is freed when the last reader is dead
        gc.collect()
        time.sleep(0.05)
    assert _num_mapped() <= before
    assert set(Path("/dev/shm").glob("*mobula*")) == files


def _num_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("mobula-weights")


@pytest.fixture
def transfers(same_host: str) -> Transfers:
    return Transfers("gloo", "cpu", TIMEOUT_S, same_host)


def test_members_that_do_not_come_are_named(transfers: Transfers) -> None:
    names_who_is_missing(transfers)


def test_a_kill_between_two_buckets(transfers: Transfers, receivers: list[Member]) -> None:
    survives_a_kill(transfers, receivers[0], receivers[1:2], fresh=receivers[2:3])


def test_a_kill_of_the_sender_in_the_middle_of_a_push(transfers: Transfers, receivers: list[Member]) -> None:
    survives_a_kill_of_the_sender(transfers, receivers[3], receivers[1:3])


def test_a_death_before_the_first_byte(transfers: Transfers, receivers: list[Member]) -> None:
    survives_a_death_before_the_first_byte(transfers, receivers[1], receivers[2:3])


def test_a_member_that_hangs(transfers: Transfers, receivers: list[Member]) -> None:
    survives_a_hang(transfers, receivers[2])
