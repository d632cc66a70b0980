"""WeightPublisher: one learner rank's part in a push. All ranks gather; rank 0 packs and sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np
import torch

from cluster.errors import WeightSyncError
from cluster.network import RendezvousStore
from cluster.weight_sync.manifest import Bucket, Manifest
from cluster.weight_sync.transport import Rendezvous, TransferGroup, pack

NamedWeights = Callable[[], Iterator[tuple[str, torch.Tensor]]]


class WeightPublisher:
    """Gathers one bucket in the training group, then sends it in the transfer group, and so on.

    The two groups never interleave within a bucket: ranks that still gather while others already send would wait for
    each other for ever.
    """

    def __init__(
        self,
        manifest: Manifest,
        named_weights: NamedWeights,
        *,
        rank: int,
        device: torch.device,
        transport: str,
        timeout_s: float,
    ) -> None:
        """`named_weights` yields (checkpoint name, whole tensor) in the manifest's order; on several ranks each
        tensor is a collective of the training group.
        """
        self.manifest = manifest
        self._named_weights = named_weights
        self._rank = rank
        self._device = device
        self._transport = transport
        self._timeout_s = timeout_s
        self._store: RendezvousStore | None = None
        self._group: TransferGroup | None = None

    def open_transfer(self, epoch: int, num_receivers: int) -> Rendezvous:
        """Rank 0 only: listen for the members of transfer group `epoch`."""
        self._store = RendezvousStore(self._timeout_s)
        return Rendezvous(
            self._store.host, self._store.port, epoch, 1 + num_receivers, self._transport, self._timeout_s
        )

    def join_transfer(self, rendezvous: Rendezvous) -> None:
        """Rank 0 becomes the sender; the other ranks have no part in the transfer group."""
        if self._rank != 0:
            return
        if self._group is not None:
            self._group.close()
        self._group = TransferGroup(rendezvous, TransferGroup.SENDER, self._device)

    def send(self, bucket_bytes: int) -> None:
        """Every rank calls this; returns when this rank's part is done."""
        for index, (bucket, packed) in enumerate(self._packed_buckets(bucket_bytes)):
            if self._rank == 0:
                if self._group is None:
                    raise WeightSyncError("the learner is in no transfer group: call join_transfer first")
                self._group.broadcast(packed, f"weight bucket {index} ({bucket.num_bytes} bytes)")

    def export(self, bucket_bytes: int) -> list[np.ndarray]:
        """The packed buckets as uint8 arrays on rank 0 (every rank gathers; the others return nothing)."""
        return [buffer.cpu().numpy() for _, buffer in self._packed_buckets(bucket_bytes) if self._rank == 0]

    def close(self) -> None:
        if self._group is not None:
            self._group.close()

    def _packed_buckets(self, bucket_bytes: int) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Each bucket and, on rank 0, its bytes."""
        weights = self._named_weights()
        for bucket in self.manifest.buckets(bucket_bytes):
            full = dict(islice(weights, len(bucket.slots)))
            buffer = torch.empty(bucket.num_bytes if self._rank == 0 else 0, dtype=torch.uint8, device=self._device)
            yield bucket, pack(bucket, full, buffer) if self._rank == 0 else buffer
