"""Nodes that do not reach each other are named with address, interface and what to do."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest

from mobula.cluster.errors import PreflightError
from mobula.deploy.run import node_network
from mobula.deploy.run.node_network import ListenAddress, ProbeEndpoint, refuse_unreached


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(node_network, "node_address", lambda: "127.0.0.1")
    monkeypatch.setattr(node_network, "CONNECT_S", 2.0)


@pytest.fixture
def endpoint() -> Iterator[ProbeEndpoint]:
    found = ProbeEndpoint("10.0.0.1")
    yield found
    found.close()


def test_an_endpoint_is_reached_at_the_address_of_its_node(endpoint: ProbeEndpoint) -> None:
    place = endpoint.open()
    assert (place.host, place.interface) == ("127.0.0.1", "lo")
    assert ProbeEndpoint("10.0.0.2").unreached([place, place]) == []


def test_a_closed_port_and_another_process_are_seen(endpoint: ProbeEndpoint) -> None:
    place = endpoint.open()
    [(other, why)] = ProbeEndpoint("b").unreached([replace(place, node="10.0.0.9")])
    assert other.node == "10.0.0.9" and "10.0.0.1 answers at that address" in why
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    [(_, why)] = ProbeEndpoint("b").unreached([replace(place, port=port)])
    assert "refused" in why


def test_a_chosen_interface_is_where_it_listens(endpoint: ProbeEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_network, "node_address", lambda: "127.0.0.2")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    place = endpoint.open()
    assert (place.host, place.interface) == ("127.0.0.1", "lo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    assert ProbeEndpoint("c").open().interface is None, "a name that no interface has"


def test_the_refusal_names_both_ends_and_the_remedy() -> None:
    a, b = (
        ListenAddress("a (10.0.0.1)", "10.0.0.1", 4000, "eth0"),
        ListenAddress("b (10.0.0.2)", "127.0.0.1", 4001, "lo"),
    )
    refuse_unreached({a: [], b: []})
    with pytest.raises(PreflightError) as refused:
        refuse_unreached({a: [(b, "Connection refused")], b: []})
    message = str(refused.value)
    assert (
        "a (10.0.0.1) at 10.0.0.1 on eth0 does not reach b (10.0.0.2) at 127.0.0.1 on lo: Connection refused" in message
    )
    assert "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME" in message and "--node-ip-address" in message
