"""The transfer group: one sender and many receivers, over gloo or nccl, apart from every other process group.

Rank 0 is the learner's rank 0; receivers have the ranks from 1 on: one each, or as many as an engine is split over.
Groups are numbered by epoch: members of another epoch can never meet, because the epoch is part of every key of the
rendezvous store. A collective runs on a helper thread and is waited for with a deadline on the calling one, since no
backend can be trusted to give up by itself. A group whose collective failed is aborted by every member that noticed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import asdict, dataclass
from datetime import timedelta
from threading import Thread
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mobula.cluster.environment_variables import environment_variables
from mobula.cluster.errors import WeightSyncError
from mobula.cluster.runtime.concurrency import DaemonThread
from mobula.cluster.weight_sync.digests import digest
from mobula.cluster.weight_sync.manifest import Bucket, Manifest
from mobula.cluster.weight_sync.rendezvous import join_store, wait_for_members

ABORT_S = 10.0  # that a member waits for its own abort
# torch's watchdog ends the process on an error or a timeout of NCCL. A group whose waits block has no watchdog, and
# reports both as errors of the wait. torch reads the variable when it makes a group.
WITHOUT_WATCHDOG = {"TORCH_NCCL_BLOCKING_WAIT": "1"}

DIGESTS = "the digests of the weight buckets"
DIGEST_BYTES = 8


@dataclass(frozen=True)
class Rendezvous:
    """Address and backend of one transfer group."""

    host: str
    port: int
    epoch: int
    world_size: int
    transport: str  # gloo | nccl
    timeout_s: float

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)


class TransferGroup:
    """One member's end of the transfer group. Broadcasts always go from rank 0 to all others."""

    SENDER = 0

    def __init__(self, rendezvous: Rendezvous, rank: int, device: torch.device) -> None:
        """Meet the others; waits for them at most `rendezvous.timeout_s`.

        It ends with a broadcast of one byte, because NCCL makes its communicator at the first collective.

        Raises:
            WeightSyncError: the others did not come, or the transport is unknown.
        """
        self.rank = rank
        self.device = device
        self._timeout_s = rendezvous.timeout_s
        self._epoch = rendezvous.epoch
        deadline = time.monotonic() + rendezvous.timeout_s
        self._group = _open_group(rendezvous, rank)
        self._thread = DaemonThread(f"transfer-epoch-{rendezvous.epoch}")
        first = torch.zeros(1, dtype=torch.uint8, device=device)
        self._broadcast_within(deadline - time.monotonic(), first, "the first byte")

    def broadcast(self, buffer: torch.Tensor, what: str) -> None:
        """Send `buffer` (rank 0) or fill it (others), in place; returns when the bytes have arrived.

        It is ordered on the caller's stream: it begins after work that the caller has queued, and what the caller
        queues later sees the bytes.

        Raises:
            WeightSyncError: some member died or did not take part in time, or the group is closed; it is closed then.
        """
        self._broadcast_within(self._timeout_s, buffer, what)

    def receive(
        self,
        manifest: Manifest,
        bucket_bytes: int,
        *,
        keeps: bool,
        into: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of everything in a push, in the manifest's order.

        With `keeps` each tensor stays what it is; without, it holds until the next one is asked for, and the memory of
        one bucket serves for all. A tensor that travels alone arrives in `into`'s of the same name, if that has its
        shape, its dtype and no gaps, and is then not given. A receiver that stops before the end leaves the group.

        Raises:
            WeightSyncError: a broadcast failed; or, once all tensors were taken, bytes differ from those of the sender.
        """
        try:
            yield from self._buckets(manifest, bucket_bytes, keeps=keeps, into=into)
        except BaseException:  # also of a consumer that fails
            self.close()
            raise

    def _buckets(
        self, manifest: Manifest, bucket_bytes: int, *, keeps: bool, into: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.empty(0, dtype=torch.uint8, device=self.device)
        buckets, digests = list(manifest.buckets(bucket_bytes)), []
        for index, bucket in enumerate(buckets):
            filled = lone_bytes(bucket, into)
            if filled is not None:
                self.broadcast(filled, f"weight bucket {index} ({bucket.num_bytes} bytes)")
            else:
                # One buffer for all buckets: its tensors are loaded before the next broadcast overwrites it.
                if keeps or buffer.numel() < bucket.num_bytes:
                    buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self.device)
                filled = buffer[: bucket.num_bytes]
                self.broadcast(filled, f"weight bucket {index} ({bucket.num_bytes} bytes)")
                yield from unpack(bucket, filled)
            digests.append(digest(filled))  # once its tensors were taken: memory that was reused too early differs
        if digests:
            sent = torch.empty(len(digests), dtype=torch.int64, device=self.device)
            self.broadcast(sent, DIGESTS)
            check_arrival(buckets, sent, digests)

    def _broadcast_within(self, timeout_s: float, buffer: torch.Tensor, what: str) -> None:
        if self._group is None:
            raise WeightSyncError(f"{what}: this member has left transfer epoch {self._epoch}")
        streams = torch.get_device_module(buffer.device)  # of the CPU: a null object
        stream = streams.current_stream()  # of this thread; the helper thread has another
        options = dist.BroadcastOptions()
        options.rootRank = self.SENDER
        options.timeout = timeout = timedelta(seconds=timeout_s)
        group = self._group

        def broadcast() -> None:
            with streams.stream(stream):
                group.broadcast([buffer], options).wait(timeout)

        try:
            # On a helper thread: a collective cannot be cancelled, and this thread has to keep its deadline.
            self._thread.submit(broadcast).result(timeout_s)
        except FutureTimeoutError as error:
            self.close()
            raise WeightSyncError(f"waited {self._timeout_s:g} s for {what} in transfer epoch {self._epoch}") from error
        except RuntimeError as error:
            self.close()
            raise WeightSyncError(f"{what} failed in transfer epoch {self._epoch}: {error}") from error

    def close(self) -> None:
        """Leave the group, once or again. Over gloo the others fail at once, over NCCL at their own deadline.

        A collective of NCCL that hangs cannot be cancelled, but aborted: its kernels end, and the memory is free.
        """
        group, self._group = self._group, None
        if group is None:
            return
        self._thread.shutdown()
        aborting = Thread(target=group.abort, name=f"abort-epoch-{self._epoch}", daemon=True)
        aborting.start()
        aborting.join(ABORT_S)


def _open_group(rendezvous: Rendezvous, rank: int) -> Any:
    timeout = timedelta(seconds=rendezvous.timeout_s)
    try:
        prefix = f"transfer-epoch-{rendezvous.epoch}"
        store = join_store(rendezvous.host, rendezvous.port, prefix, rendezvous.timeout_s)
        if rendezvous.transport in ("gloo", "nccl"):
            # NCCL's init has no deadline and cannot be aborted, so it begins when all are there.
            wait_for_members(store, rank, rendezvous.world_size, rendezvous.timeout_s)
        if rendezvous.transport == "gloo":
            return dist.ProcessGroupGloo(store, rank, rendezvous.world_size, timeout)
        if rendezvous.transport == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = 2 * timeout  # ours ends first
            with environment_variables(WITHOUT_WATCHDOG):
                return dist.ProcessGroupNCCL(store, rank, rendezvous.world_size, options)
    except RuntimeError as error:
        raise WeightSyncError(
            f"rank {rank} of {rendezvous.world_size} could not join transfer epoch {rendezvous.epoch} at "
            f"{rendezvous.host}:{rendezvous.port} over {rendezvous.transport}: {error}"
        ) from error
    raise WeightSyncError(f"resources.transport={rendezvous.transport} is unknown: use gloo or nccl")


def lone_bytes(bucket: Bucket, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The bytes, uint8, of a bucket's only tensor where it lies in `tensors`; None if they are not the bucket's own."""
    spec = bucket.slots[0].spec
    if len(bucket.slots) > 1 or spec.name not in tensors:
        return None
    tensor = tensors[spec.name].detach()
    fits = tensor.dtype is getattr(torch, spec.dtype) and tuple(tensor.shape) == spec.shape and tensor.is_contiguous()
    return tensor.view(-1).view(torch.uint8) if fits else None


def pack(bucket: Bucket, tensors: dict[str, torch.Tensor], buffer: torch.Tensor) -> torch.Tensor:
    """Copy the bucket's tensors into the front of `buffer` (uint8); returns the filled part."""
    for slot in bucket.slots:
        source = tensors[slot.spec.name].detach().to(getattr(torch, slot.spec.dtype)).contiguous()
        view = buffer[slot.offset : slot.offset + slot.spec.num_bytes]
        view.copy_(source.view(-1).view(torch.uint8))
    return buffer[: bucket.num_bytes]


def unpack(bucket: Bucket, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Name and view of each tensor in a filled bucket; the views share the buffer's memory."""
    return [
        (
            slot.spec.name,
            buffer[slot.offset : slot.offset + slot.spec.num_bytes]
            .view(getattr(torch, slot.spec.dtype))
            .view(slot.spec.shape),
        )
        for slot in bucket.slots
    ]


def with_digest(packed: torch.Tensor) -> np.ndarray:
    """A packed bucket as uint8 in host memory, and its digest in `DIGEST_BYTES` behind it."""
    return torch.cat([packed.cpu(), digest(packed).cpu().reshape(1).view(torch.uint8)]).numpy()


def unpack_all(
    manifest: Manifest, bucket_bytes: int, packed: Iterable[np.ndarray]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of everything in an exported push, whose buckets have their digests behind them.

    Raises:
        WeightSyncError: once all tensors were taken: the bytes of a bucket have another digest.
    """
    buckets, sent, arrived = list(manifest.buckets(bucket_bytes)), [], []
    for bucket, data in zip(buckets, packed, strict=True):
        filled = torch.from_numpy(data[: bucket.num_bytes].copy())
        yield from unpack(bucket, filled)
        sent.append(torch.from_numpy(data[-DIGEST_BYTES:].copy()).view(torch.int64)[0])
        arrived.append(digest(filled))
    if buckets:
        check_arrival(buckets, torch.stack(sent), arrived)


def check_arrival(buckets: Sequence[Bucket], sent: torch.Tensor, arrived: Sequence[torch.Tensor]) -> None:
    """Compare the digests of the sender, int64 [number of buckets], with those of the bytes that arrived.

    Raises:
        WeightSyncError: names the buckets that differ.
    """
    is_other = (sent != torch.stack(list(arrived))).tolist()
    wrong = [bucket for bucket, differs in zip(buckets, is_other, strict=True) if differs]
    if wrong:
        named = ", ".join(_named(bucket) for bucket in wrong[:3]) + (", ..." if len(wrong) > 3 else "")
        raise WeightSyncError(
            f"{len(wrong)} of {len(buckets)} weight buckets did not arrive as they were sent ({named})"
        )


def _named(bucket: Bucket) -> str:
    """The bucket by its tensors."""
    first, others = bucket.slots[0].spec.name, len(bucket.slots) - 1
    return f"{first} and {others} more tensors" if others else first
