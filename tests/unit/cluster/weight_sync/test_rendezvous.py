"""Rendezvous stores: met at the address that they announce, on a port of their own, apart by prefix."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest

from mobula.cluster.runtime.network import LOOPBACK
from mobula.cluster.weight_sync.rendezvous import RendezvousStore, join_store


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> RendezvousStore:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    return RendezvousStore(timeout_s=10)


def test_outside_a_cluster_a_store_listens_on_the_loopback_alone(store: RendezvousStore) -> None:
    assert store.host == LOOPBACK


def test_two_stores_never_share_a_port(store: RendezvousStore) -> None:
    others = [RendezvousStore(timeout_s=10) for _ in range(5)]
    assert len({store.port, *(other.port for other in others)}) == 6
    with pytest.raises(OSError, match="in use"):
        socket.create_server((store.host, store.port))


def test_members_see_what_others_of_their_prefix_wrote_and_nothing_else(store: RendezvousStore) -> None:
    one, other, stranger = [join_store(store.host, store.port, prefix, 10) for prefix in ("a", "a", "b")]
    one.set("address", "here")
    assert other.get("address") == b"here"
    stranger.set_timeout(timedelta(milliseconds=200))
    with pytest.raises(RuntimeError):
        stranger.get("address")
