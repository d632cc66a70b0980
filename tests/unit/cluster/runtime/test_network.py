"""Rendezvous stores: met where they say, on a port of their own, apart by prefix."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest

from cluster.runtime.network import LOOPBACK, RendezvousStore, join_store, node_address


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> RendezvousStore:
    monkeypatch.setattr("cluster.runtime.network.ray.is_initialized", lambda: False)
    return RendezvousStore(timeout_s=10)


def test_outside_a_cluster_a_node_is_met_on_the_loopback_alone(store: RendezvousStore) -> None:
    assert (node_address(), store.host) == (LOOPBACK, LOOPBACK)


def test_inside_a_cluster_a_node_is_met_at_its_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.runtime.network.ray.is_initialized", lambda: True)
    monkeypatch.setattr("cluster.runtime.network.ray.util.get_node_ip_address", lambda: "10.1.2.3")
    assert node_address() == "10.1.2.3"


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
