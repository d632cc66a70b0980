"""WeightPublisher: one learner rank's part in a push. All ranks gather; the senders among them pack and send."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np
import torch

from mobula.cluster.errors import WeightSyncError
from mobula.cluster.weight_sync.digests import digest
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.cluster.weight_sync.rendezvous import RendezvousStore
from mobula.cluster.weight_sync.transport import DIGESTS, Rendezvous, TransferGroup, lone_bytes, pack, with_digest

NO_BYTES = np.empty(0, dtype=np.uint8)
NamedWeights = Callable[[], Iterator[tuple[str, torch.Tensor]]]


class WeightPublisher:
    """Gathers a round of buckets in the training group, then sends its own one in the transfer group, and so on.

    A round has one bucket for each sender, so the senders broadcast at the same time. Within a rank the two groups
    never interleave: ranks that still gather while others already send would wait for each other for ever.
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
        num_ranks: int = 1,
        num_senders: int = 1,
    ) -> None:
        """`named_weights` yields (checkpoint name, whole tensor) in the manifest's order; on several ranks each
        tensor is a collective of the training group. Ranks below `num_senders` send.
        """
        self.manifest = manifest
        self._named_weights = named_weights
        self._rank = rank
        self._num_ranks = num_ranks
        self._num_senders = min(num_senders, num_ranks)
        self._device = device
        self._transport = transport
        self._timeout_s = timeout_s
        self._staging = torch.empty(0, dtype=torch.uint8, device=device)
        self._stores: dict[int, RendezvousStore] = {}
        self._groups: dict[int, TransferGroup] = {}

    def open_transfer(self, epoch: int, num_receivers: int) -> Rendezvous:
        """Rank 0 only: listen for the members of transfer group `epoch`."""
        store = self._stores[epoch] = RendezvousStore(self._timeout_s)
        size, transport = 1 + num_receivers, self._transport
        return Rendezvous(store.host, store.port, epoch, size, transport, self._timeout_s, self._num_senders)

    def join_transfer(self, rendezvous: Rendezvous) -> None:
        """A sender joins, beside the groups that it is in; other ranks have no part in transfer groups."""
        if self._rank < self._num_senders:
            group = TransferGroup(rendezvous, TransferGroup.SENDER, self._device, sender=self._rank)
            self._groups[rendezvous.epoch] = group

    def leave_transfer(self, epoch: int) -> None:
        """Close one transfer group, if it is still there; members that wait in it fail at once."""
        if epoch in self._groups:
            self._groups.pop(epoch).close()
        self._stores.pop(epoch, None)

    def send(self, bucket_bytes: int, epoch: int) -> None:
        """Broadcast to transfer group `epoch`: this rank's buckets, then their digests, int64 [number of them]. Every
        rank calls this; returns when this rank's part is done.

        Raises:
            WeightSyncError: on a sender: a member failed or the group is not there; its members fail as well.
        """
        failure: WeightSyncError | None = None
        digests: list[torch.Tensor] = []
        packed: torch.Tensor | None = None
        last = sum(1 for _ in self.manifest.buckets(bucket_bytes)) - 1
        for index, own in enumerate(self._packed_buckets(bucket_bytes, self._num_senders)):
            # To the last bucket whatever happens: each is a collective in which the other ranks wait for this one.
            packed = packed if own is None else own
            is_round_over = index == last or index % self._num_senders == self._num_senders - 1
            if is_round_over and packed is not None and failure is None:
                sent = index - index % self._num_senders + self._rank
                digests.append(digest(packed))
                failure = self._broadcast(epoch, packed, f"weight bucket {sent} ({packed.numel()} bytes)")
                packed = None
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
        """The packed buckets as uint8 arrays, each with its digest behind it; every rank gathers, and has bucket
        `i` if it is rank `i % num_ranks`: the others are empty."""
        packed = self._packed_buckets(bucket_bytes, self._num_ranks)
        return [NO_BYTES if buffer is None else with_digest(buffer) for buffer in packed]

    def close(self) -> None:
        for epoch in tuple(self._groups):
            self.leave_transfer(epoch)

    def _packed_buckets(self, bucket_bytes: int, num_owners: int) -> Iterator[torch.Tensor | None]:
        """The bytes of each bucket on the rank that has it of `num_owners`, else None. They hold until that rank's next
        one: fresh memory for each would cost more than the copy, for its pages have to be mapped first.
        """
        weights = self._named_weights()
        for index, bucket in enumerate(self.manifest.buckets(bucket_bytes)):
            full = dict(islice(weights, len(bucket.slots)))
            if index % num_owners != self._rank:
                yield None
            elif (lone := lone_bytes(bucket, full)) is not None:
                yield lone.to(self._device)  # where weights are offloaded, they come from host memory
            else:
                yield pack(bucket, full, self._staged(bucket.num_bytes))

    def _staged(self, num_bytes: int) -> torch.Tensor:
        if self._staging.numel() < num_bytes:
            self._staging = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._staging
