"""Rendezvous of the ranks of a model that is trained."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from mobula.cluster.weight_sync.rendezvous import RendezvousStore, join_store
from mobula.configs.schema import RunConfig

COLLECTIVES = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""The collectives of a process group, by `resources.device`."""
PREFIX = "learner"
GLOO = "/gloo/transport/"  # part of gloo's messages: its errors have no class


class RankRendezvous:
    """Joins one rank to the default process group. Rank 0 hosts the rendezvous store."""

    def __init__(self) -> None:
        self._store: RendezvousStore | None = None

    def address(self, timeout_s: float) -> str:
        """`host:port` for all ranks; call it on rank 0."""
        self._store = RendezvousStore(timeout_s)
        return f"{self._store.host}:{self._store.port}"

    def join(self, address: str, *, rank: int, world_size: int, backend: str, timeout_s: float) -> None:
        """Creates the default process group with the ranks at `address`; `timeout_s` bounds every collective."""
        host, port = address.rsplit(":", 1)
        store = join_store(host, int(port), PREFIX, timeout_s)
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)

    def join_as_configured(self, address: str, config: RunConfig, *, rank: int, world_size: int) -> None:
        """`join` with the collectives of `resources.device`; `learner.backend=single` has no process group."""
        if config.learner.backend == "single":
            return
        backend, timeout_s = COLLECTIVES[config.resources.device], config.timeouts.update_s
        self.join(address, rank=rank, world_size=world_size, backend=backend, timeout_s=timeout_s)


def is_peer_lost(error: Exception) -> bool:
    """Whether a rank's error reports the loss or absence of another rank, not a failure of the rank."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and GLOO in str(error))
