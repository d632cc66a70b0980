"""Address and network interface of this node."""

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
    """Returns this node's address for other nodes; outside a cluster the loopback address."""
    ray = sys.modules.get("ray")  # a process without ray is not in a cluster
    return ray.util.get_node_ip_address() if ray is not None and ray.is_initialized() else LOOPBACK


def use_node_interface() -> None:
    """Selects the interface of the node's Ray address for collectives of this process and child processes.

    By default gloo and NCCL use the interface to which the hostname resolves. On Debian that is loopback (127.0.1.1),
    and groups over several nodes never connect. Variables that are already set are kept.
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
    """Returns the network interface with this IP address; None if there is none."""
    import psutil  # inside the function: learner and samplers do not need it

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return name
    return None
