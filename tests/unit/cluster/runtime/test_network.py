"""Rendezvous stores: met at the address that they announce, on a port of their own, apart by prefix."""

from __future__ import annotations

import socket
from datetime import timedelta
from types import SimpleNamespace

import pytest

from cluster.runtime import network
from cluster.runtime.network import LOOPBACK, RendezvousStore, join_store, node_address, use_node_interface


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


def variables(monkeypatch: pytest.MonkeyPatch, address: str, **found: str) -> dict[str, str]:
    """What a process on a node with this address has in its environment afterwards."""
    environment = dict(found)
    monkeypatch.setattr(network.os, "environ", environment)
    monkeypatch.setattr(network, "node_address", lambda: address)
    monkeypatch.setattr(
        network.psutil,
        "net_if_addrs",
        lambda: {
            "lo": [SimpleNamespace(address="127.0.0.1")],
            "eth0": [SimpleNamespace(address="fe80::1"), SimpleNamespace(address="192.168.0.2")],
            "ib0": [SimpleNamespace(address="10.0.0.2")],
        },
    )
    use_node_interface()
    return environment


def test_collectives_use_the_interface_of_the_nodes_ray_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert variables(monkeypatch, "10.0.0.2") == {
        "VLLM_HOST_IP": "10.0.0.2",
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_SOCKET_IFNAME": "ib0",
    }
    assert variables(monkeypatch, "127.0.0.1")["GLOO_SOCKET_IFNAME"] == "lo"


def test_variables_that_the_user_sets_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    found = variables(monkeypatch, "10.0.0.2", GLOO_SOCKET_IFNAME="eth0", VLLM_HOST_IP="1.2.3.4")
    assert found == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "ib0", "VLLM_HOST_IP": "1.2.3.4"}


def test_an_address_without_an_interface_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert "GLOO_SOCKET_IFNAME" not in variables(monkeypatch, "10.9.9.9")
    assert "10.9.9.9" in caplog.text and "GLOO_SOCKET_IFNAME" in caplog.text
