"""Where a process can be met: its node's address, and rendezvous stores on sockets bound before they are named."""

from __future__ import annotations

import logging
import os
import socket
from datetime import timedelta

import psutil
import ray
import torch.distributed as dist

_logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # read when a process group is made
ADDRESS_VARIABLE = "VLLM_HOST_IP"
PENDING_CONNECTIONS = 128


def node_address() -> str:
    """The address under which other nodes reach this one; the loopback address outside a cluster."""
    return ray.util.get_node_ip_address() if ray.is_initialized() else LOOPBACK


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
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address == address for found in addresses):
            return name
    return None


class RendezvousStore:
    """A key-value store in which the members of a process group find each other.

    It listens on the node's own address alone, on a port that the kernel chose, so two runs on one host never race for
    one. Keep the object for as long as members may join.
    """

    def __init__(self, timeout_s: float) -> None:
        self.host = node_address()
        self._socket = socket.create_server((self.host, 0), backlog=PENDING_CONNECTIONS)
        self.port = int(self._socket.getsockname()[1])
        self._store = dist.TCPStore(
            self.host,
            self.port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=self._socket.detach(),
        )


def join_store(host: str, port: int, prefix: str, timeout_s: float) -> dist.Store:
    """A member's view of the store at `host:port`; keys of other prefixes are out of its sight."""
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
    return dist.PrefixStore(prefix, store)
