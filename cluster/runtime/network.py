"""The address of this node, and the network interface that has it."""

from __future__ import annotations

import logging
import os
import socket
import sys

_logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # read when a process group is made
ADDRESS_VARIABLE = "VLLM_HOST_IP"


def node_address() -> str:
    """The address under which other nodes reach this one; the loopback address outside a cluster."""
    ray = sys.modules.get("ray")  # a process that has not imported it is in no cluster
    return ray.util.get_node_ip_address() if ray is not None and ray.is_initialized() else LOOPBACK


def use_node_interface() -> None:
    """Have the collectives of this process and its children use the interface of the node's Ray address.

    Left to themselves, gloo and NCCL take the interface that the hostname resolves to, which is the loopback one on
    Debian (127.0.1.1): groups over several nodes then never meet. A variable that is set already stays.
    """
    address = node_address()
    os.environ.setdefault(ADDRESS_VARIABLE, address)
    name = interface_of(address)
    if name is None:
        _logger.warning(
            "no network interface of %s has the address %s of its Ray node: set %s if collectives do not meet",
            socket.gethostname(),
            address,
            " and ".join(INTERFACE_VARIABLES),
        )
        return
    for variable in INTERFACE_VARIABLES:
        os.environ.setdefault(variable, name)


def interface_of(address: str) -> str | None:
    """The network interface that has this IP address; None if none has."""
    import psutil  # which learner and samplers do without

    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address == address for found in addresses):
            return name
    return None
