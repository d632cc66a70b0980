"""Stores in which the members of a process group meet, on sockets that are bound before they are named."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist

from mobula.cluster.runtime.network import node_address

PENDING_CONNECTIONS = 128


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
    """Returns a member's view of the store at `host:port`: the keys with `prefix`."""
    # torch asks the resolver for the name of the address first: a lost request delays a join by 5 s (resolv.conf).
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
    return dist.PrefixStore(prefix, store)


def wait_for_members(
    store: dist.Store, rank: int, world_size: int, timeout_s: float, text: str = "here"
) -> list[bytes]:
    """Wait until every rank has called this with the same store; returns their texts in the order of the ranks.

    Raises:
        DistStoreError: some did not within `timeout_s`; the message names them.
    """
    # Keys in the store instead of a barrier: a barrier of the group does not say who is missing.
    keys = [f"member-{number}" for number in range(world_size)]
    store.set(keys[rank], text)
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        missing = [number for number, key in enumerate(keys) if not store.check([key])]
        raise dist.DistStoreError(f"ranks {missing} did not come within {timeout_s:g} s") from error
    return store.multi_get(keys)
