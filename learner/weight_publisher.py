"""WeightPublisher: a learner rank's part in a weight sync. All ranks gather tensors; senders pack and broadcast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from itertools import islice

import numpy as np
import torch

from mobula.cluster.errors import WeightSyncError
from mobula.cluster.weight_sync import changes
from mobula.cluster.weight_sync.manifest import Bucket, Manifest, TensorSpec
from mobula.cluster.weight_sync.transport import (
    DIGESTS,
    Rendezvous,
    RendezvousStore,
    TransferGroup,
    lone_bytes,
    pack,
    unpack,
    with_digest,
)

NO_BYTES = np.empty(0, dtype=np.uint8)
NamedWeights = Callable[[], Iterator[tuple[str, torch.Tensor]]]


@dataclass(eq=False)
class WeightPublisher:
    """Alternates between gathering a round of buckets in the training group and sending one in the transfer group.

    A round has one bucket for each sender, so the senders broadcast in parallel. Within a rank the two groups never
    interleave: a rank that still gathers and a rank that already sends would deadlock.
    """

    manifest: Manifest
    named_weights: NamedWeights
    """Yields (checkpoint name, whole tensor) in the manifest's order; each tensor is a collective of the training
    group."""
    _: KW_ONLY
    rank: int
    device: torch.device
    transport: str
    timeout_s: float
    num_ranks: int = 1
    num_senders: int = 1  # ranks below this number send
    same_host: str = "memory"

    def __post_init__(self) -> None:
        self.num_senders = min(self.num_senders, self.num_ranks)
        self._staging = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._base = changes.Base()  # this rank's part of the last push of changes, in host memory
        self._stores: dict[int, RendezvousStore] = {}
        self._groups: dict[int, TransferGroup] = {}

    def open_transfer(self, epoch: int, num_receivers: int) -> Rendezvous:
        """Opens the rendezvous of transfer group `epoch`. Called on rank 0."""
        store = self._stores[epoch] = RendezvousStore(self.timeout_s)
        return Rendezvous(
            store.host,
            store.port,
            epoch,
            1 + num_receivers,
            self.transport,
            self.timeout_s,
            self.num_senders,
            self.same_host,
        )

    def join_transfer(self, rendezvous: Rendezvous) -> None:
        """Joins a transfer group, in addition to earlier ones. Does nothing on ranks that do not send."""
        if self.rank < self.num_senders:
            group = TransferGroup(rendezvous, TransferGroup.SENDER, self.device, sender=self.rank)
            self._groups[rendezvous.epoch] = group

    def leave_transfer(self, epoch: int) -> None:
        """Closes a transfer group, if it is open; waiting members fail at once."""
        if epoch in self._groups:
            self._groups.pop(epoch).close()
        self._stores.pop(epoch, None)

    def send(self, bucket_bytes: int, epoch: int) -> changes.PushedChanges:
        """Broadcasts this rank's buckets to transfer group `epoch`, then their digests, int64 [number of buckets].
        Called on every rank; returns what this rank sent."""
        buckets = list(self.manifest.buckets(bucket_bytes))
        digests: list[torch.Tensor] = []
        sent: list[tuple[TensorSpec, torch.Tensor]] = []

        def send_bucket(index: int, packed: torch.Tensor) -> WeightSyncError | None:
            digests.append(changes.digest(packed))
            slots = buckets[index].slots
            for slot in slots:  # gaps between tensors have no defined bytes
                part = packed[slot.offset : slot.offset + slot.spec.num_bytes]
                sent.append((slot.spec, digests[-1] if len(slots) == 1 else changes.digest(part)))
            return self._broadcast(epoch, packed, f"weight bucket {index} ({packed.numel()} bytes)")

        self._send_rounds(bucket_bytes, send_bucket)
        # Last: receivers compare after loading all tensors, which detects memory that was reused too early.
        if digests and (failure := self._broadcast(epoch, torch.stack(digests), DIGESTS)) is not None:
            raise failure
        values = torch.stack([value for _, value in sent]).tolist() if sent else []
        checksum = changes.weights_checksum((spec, value) for (spec, _), value in zip(sent, values, strict=True))
        return changes.PushedChanges(sum(spec.num_bytes for spec, _ in sent), None, checksum)

    def send_changes(self, bucket_bytes: int, epoch: int, step: changes.VersionStep) -> changes.PushedChanges:
        """Broadcasts the changes of this rank's buckets since `step.base_version`: of each bucket the headers, int64
        [tensors, HEADER], and, if there are any, the changes. Called on every rank.

        Sends whole tensors if it does not hold that version. With `step.is_last` it holds `step.version` afterwards.
        """
        buckets = list(self.manifest.buckets(bucket_bytes))
        has_base = step.base_version is not None and step.base_version == self._base.version
        sent: list[changes.PushedChanges] = []

        def send_bucket(index: int, packed: torch.Tensor) -> WeightSyncError | None:
            messages = self._messages(buckets[index], packed, has_base=has_base)
            headers = [item.header for item in messages]
            starts = changes.offsets(buckets[index], headers)
            if step.is_last:
                for slot, item in zip(buckets[index].slots, messages, strict=True):
                    spec = slot.spec
                    if spec.name not in self._base.tensors:
                        self._base.tensors[spec.name] = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
                    changes.apply(item.header, item.data, changes.words_of(self._base.tensors[spec.name], spec))
            header = torch.tensor(headers, dtype=torch.int64, device=self.device)
            failure = self._broadcast(epoch, header, f"the header of weight bucket {index}")
            if starts[-1] > 0 and failure is None:
                body = torch.zeros(starts[-1], dtype=torch.uint8, device=self.device)
                for start, item in zip(starts, messages, strict=False):
                    body[start : start + item.data.numel()] = item.data
                failure = self._broadcast(epoch, body, f"the changes of weight bucket {index} ({starts[-1]} bytes)")
            digests = ((slot.spec, item.header[-1]) for slot, item in zip(buckets[index].slots, messages, strict=True))
            num_bytes = 8 * changes.HEADER * len(headers) + starts[-1]
            num_changed = sum(message.num_changed for message in messages)
            sent.append(changes.PushedChanges(num_bytes, num_changed, changes.weights_checksum(digests)))
            return failure

        with self._base.changing_to(step.version) if step.is_last else nullcontext():
            self._send_rounds(bucket_bytes, send_bucket)
        return changes.PushedChanges.total(sent)

    def _messages(self, bucket: Bucket, packed: torch.Tensor, *, has_base: bool) -> list[changes.TensorChanges]:
        """Returns the message of each tensor of a packed bucket."""
        messages = []
        for slot, (name, tensor) in zip(bucket.slots, unpack(bucket, packed), strict=True):
            base = changes.words_of(self._base.tensors[name], slot.spec).to(self.device) if has_base else None
            messages.append(changes.message(changes.words_of(tensor, slot.spec), base))
        return messages

    def _send_rounds(
        self, bucket_bytes: int, send_bucket: Callable[[int, torch.Tensor], WeightSyncError | None]
    ) -> None:
        """Gathers rounds of buckets on every rank; after each round calls `send_bucket` with this rank's bucket."""
        failure: WeightSyncError | None = None
        packed: torch.Tensor | None = None
        last = sum(1 for _ in self.manifest.buckets(bucket_bytes)) - 1
        for index, own in enumerate(self._packed_buckets(bucket_bytes, self.num_senders)):
            # Also after a failure: each bucket is a collective in which the other ranks wait for this rank.
            packed = packed if own is None else own
            is_round_over = index == last or index % self.num_senders == self.num_senders - 1
            if is_round_over and packed is not None and failure is None:
                failure = send_bucket(index - index % self.num_senders + self.rank, packed)
                packed = None
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
        """Returns the packed buckets as uint8 arrays, each followed by its digest. Every rank gathers; rank
        `i % num_ranks` has bucket `i`, the others get an empty array."""
        packed = self._packed_buckets(bucket_bytes, self.num_ranks)
        return [NO_BYTES if buffer is None else with_digest(buffer) for buffer in packed]

    def close(self) -> None:
        for epoch in tuple(self._groups):
            self.leave_transfer(epoch)

    def _packed_buckets(self, bucket_bytes: int, num_owners: int) -> Iterator[torch.Tensor | None]:
        """Yields the bytes of each bucket on its owner, rank `index % num_owners`, and None on other ranks.

        The bytes are valid until the owner's next bucket, which reuses the buffer: mapping fresh pages for each bucket
        costs more than the copy.
        """
        weights = self.named_weights()
        for index, bucket in enumerate(self.manifest.buckets(bucket_bytes)):
            full = dict(islice(weights, len(bucket.slots)))
            if index % num_owners != self.rank:
                yield None
            elif (lone := lone_bytes(bucket, full)) is not None:
                yield lone.to(self.device)  # offloaded weights are in host memory
            else:
                if self._staging.numel() < bucket.num_bytes:
                    self._staging = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self.device)
                yield pack(bucket, full, self._staging)
