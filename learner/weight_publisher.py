"""WeightPublisher: one learner rank's part in a push. All ranks gather; rank 0 packs and sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np
import torch

from mobula.cluster.errors import WeightSyncError
from mobula.cluster.weight_sync.digests import digest
from mobula.cluster.weight_sync.manifest import Bucket, Manifest
from mobula.cluster.weight_sync.rendezvous import RendezvousStore
from mobula.cluster.weight_sync.transport import DIGESTS, Rendezvous, TransferGroup, lone_bytes, pack, with_digest

NO_BYTES = np.empty(0, dtype=np.uint8)
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
        self._staging = torch.empty(0, dtype=torch.uint8, device=device)
        self._stores: dict[int, RendezvousStore] = {}
        self._groups: dict[int, TransferGroup] = {}

    def open_transfer(self, epoch: int, num_receivers: int) -> Rendezvous:
        """Rank 0 only: listen for the members of transfer group `epoch`."""
        store = self._stores[epoch] = RendezvousStore(self._timeout_s)
        return Rendezvous(store.host, store.port, epoch, 1 + num_receivers, self._transport, self._timeout_s)

    def join_transfer(self, rendezvous: Rendezvous) -> None:
        """Rank 0 becomes the sender, beside the groups that it is in; other ranks have no part in transfer groups."""
        if self._rank == 0:
            self._groups[rendezvous.epoch] = TransferGroup(rendezvous, TransferGroup.SENDER, self._device)

    def leave_transfer(self, epoch: int) -> None:
        """Close one transfer group, if it is still there; members that wait in it fail at once."""
        if epoch in self._groups:
            self._groups.pop(epoch).close()
        self._stores.pop(epoch, None)

    def send(self, bucket_bytes: int, epoch: int) -> None:
        """Broadcast to transfer group `epoch`: the buckets, then their digests, int64 [number of buckets]. Every rank
        calls this; returns when this rank's part is done.

        Raises:
            WeightSyncError: on rank 0: a member failed or the group is not there; its members fail as well.
        """
        failure: WeightSyncError | None = None
        digests: list[torch.Tensor] = []
        for index, (bucket, packed) in enumerate(self._packed_buckets(bucket_bytes)):
            # To the last bucket whatever happens: each is a collective in which the other ranks wait for this one.
            if self._rank == 0 and failure is None:
                digests.append(digest(packed))
                failure = self._broadcast(epoch, packed, f"weight bucket {index} ({bucket.num_bytes} bytes)")
        # Last: receivers compare when every tensor was loaded, so memory that was reused too early differs.
        if digests and failure is None:
            failure = self._broadcast(epoch, torch.stack(digests), DIGESTS)
        if failure is not None:
            raise failure

    def _broadcast(self, epoch: int, packed: torch.Tensor, what: str) -> WeightSyncError | None:
        if epoch not in self._groups:
            return WeightSyncError(f"the learner is not in transfer group {epoch}: call join_transfer first")
        try:
            self._groups[epoch].broadcast(packed, what)
        except WeightSyncError as error:
            self.leave_transfer(epoch)
            return error
        return None

    def export(self, bucket_bytes: int) -> list[np.ndarray]:
        """The packed buckets as uint8 arrays, each with its digest behind it; every rank gathers, and those of
        others than rank 0 are empty."""
        packed = self._packed_buckets(bucket_bytes)
        return [with_digest(buffer) if self._rank == 0 else NO_BYTES for _, buffer in packed]

    def close(self) -> None:
        for epoch in tuple(self._groups):
            self.leave_transfer(epoch)

    def _packed_buckets(self, bucket_bytes: int) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Each bucket and, on rank 0, its bytes, which hold until the next one: fresh memory for each would cost more
        than the copy, for its pages have to be mapped first.
        """
        weights = self._named_weights()
        for bucket in self.manifest.buckets(bucket_bytes):
            full = dict(islice(weights, len(bucket.slots)))
            if self._rank != 0:
                yield bucket, self._staging
            elif (lone := lone_bytes(bucket, full)) is not None:
                yield bucket, lone.to(self._device)  # where weights are offloaded, they come from host memory
            else:
                yield bucket, pack(bucket, full, self._staged(bucket.num_bytes))

    def _staged(self, num_bytes: int) -> torch.Tensor:
        if self._staging.numel() < num_bytes:
            self._staging = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._staging
