"""Members of a transfer group over gloo that die or hang: the others leave in time and meet in a new epoch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transfer_faults import (
    Transfers,
    names_who_is_missing,
    survives_a_death_before_the_first_byte,
    survives_a_hang,
    survives_a_kill,
)
from transfer_members import Member, members

TIMEOUT_S = 5.0


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture(scope="module")
def receivers() -> Iterator[list[Member]]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("GLOO_SOCKET_IFNAME", "lo")
        with members("cpu", "cpu", "cpu") as started:
            yield started


@pytest.fixture
def transfers() -> Transfers:
    return Transfers("gloo", "cpu", TIMEOUT_S)


def test_members_that_do_not_come_are_named(transfers: Transfers) -> None:
    names_who_is_missing(transfers)


def test_a_kill_between_two_buckets(transfers: Transfers, receivers: list[Member]) -> None:
    survives_a_kill(transfers, receivers[0], receivers[1:2], fresh=receivers[2:])


def test_a_death_before_the_first_byte(transfers: Transfers, receivers: list[Member]) -> None:
    survives_a_death_before_the_first_byte(transfers, receivers[1], receivers[2:])


def test_a_member_that_hangs(transfers: Transfers, receivers: list[Member]) -> None:
    survives_a_hang(transfers, receivers[2])
