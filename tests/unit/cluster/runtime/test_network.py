"""The node's address, and the interface that collectives use."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mobula.cluster.runtime import network
from mobula.cluster.runtime.network import LOOPBACK, node_address, use_node_interface


def test_outside_a_cluster_a_node_is_met_on_the_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    assert node_address() == LOOPBACK


def test_inside_a_cluster_a_node_is_met_at_its_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.1.2.3")
    assert node_address() == "10.1.2.3"


def variables(monkeypatch: pytest.MonkeyPatch, address: str, **found: str) -> dict[str, str]:
    """What a process on a node with this address has in its environment afterwards."""
    environment = dict(found)
    monkeypatch.setattr(network.os, "environ", environment)
    monkeypatch.setattr(network, "node_address", lambda: address)
    monkeypatch.setattr(
        "psutil.net_if_addrs",
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
