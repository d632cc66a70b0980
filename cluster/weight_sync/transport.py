"""Transports of weights between processes, and where they meet."""

from __future__ import annotations

import json
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from mobula.cluster.runtime.network import node_address
from mobula.cluster.weight_sync.changes import HEADER, Base, apply_bucket, digest, offsets
from mobula.cluster.weight_sync.manifest import Bucket, Manifest
from mobula.cluster.weight_sync.shared_ring import Location, RingReader, RingWriter, join, listener, share

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
    """Wait until every rank has called this with the same store; returns their texts in the order of the ranks."""
    # Keys in the store instead of a barrier: a barrier of the group does not say who is missing.
    keys = [f"member-{number}" for number in range(world_size)]
    store.set(keys[rank], text)
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        missing = [number for number, key in enumerate(keys) if not store.check([key])]
        raise dist.DistStoreError(f"ranks {missing} did not come within {timeout_s:g} s") from error
    return store.multi_get(keys)


# The transfer group: learner ranks that send, and receivers, separate from other process groups.
#
# Each sender has a channel to all receivers, so that senders broadcast in parallel. In each channel the sender is rank
# 0;
# receivers have the ranks from 1 on: one, or one for each rank of a split engine. Receivers on the sender's host read
# memory that it shares with them (`shared_ring`); the others form a process group with it, over gloo or nccl. Sender
# `i % num_senders` sends bucket `i` of a push.
# Transfer groups are numbered by epoch. The epoch is part of every key of the rendezvous store, so members of different
# epochs cannot meet. A collective runs on a helper thread while the calling thread waits with a deadline, because no
# backend reliably times out. A member that notices a failed collective aborts its group.

ABORT_S = 10.0  # timeout of a member's abort

# torch's watchdog ends the process on an error or a timeout of NCCL. A group with blocking waits has no watchdog, and
# reports both as errors of the wait. torch reads the variable when it creates a group.
WITHOUT_WATCHDOG = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
DIGESTS = "the digests of the weight buckets"
DIGEST_BYTES = 8


@dataclass(frozen=True)
class Rendezvous:
    """Address and backend of a transfer group; `world_size` counts one sender and all receivers."""

    host: str
    port: int
    epoch: int
    world_size: int
    transport: str  # gloo | nccl
    timeout_s: float
    num_senders: int = 1
    same_host: str = "memory"  # memory | network: how bytes reach receivers on the sender's host

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Channel:
    """The connections between one sender and its receivers, and the thread that moves bytes."""

    group: Any  # a process group; None if all receivers use shared memory
    rings: tuple[RingWriter | RingReader, ...]
    thread: DaemonThread

    def move(self, buffer: torch.Tensor, timeout: timedelta) -> None:
        work = None
        if self.group is not None:
            options = dist.BroadcastOptions()
            options.rootRank = TransferGroup.SENDER
            options.timeout = timeout
            work = self.group.broadcast([buffer], options)
        for ring in self.rings:
            ring.move(buffer)
        if work is not None:
            work.wait(timeout)

    def close(self) -> None:
        for ring in self.rings:
            ring.leave()
        # On the thread, so after the copy that it may be in.
        released = [self.thread.submit(ring.release) for ring in self.rings]
        self.thread.shutdown()
        if self.group is not None:
            self.group.abort()
        if any(isinstance(ring, RingReader) for ring in self.rings):
            released[0].result()  # the caller may free the memory that it received into


class TransferGroup:
    """A member of a transfer group: a sender broadcasts to all receivers, a receiver receives from all senders."""

    SENDER = 0

    def __init__(self, rendezvous: Rendezvous, rank: int, device: torch.device, *, sender: int = 0) -> None:
        """Joins the group, with `rank` 0 as sender number `sender`, and waits for the other members at most
        `rendezvous.timeout_s`.

        Ends with a broadcast of one byte, because NCCL creates its communicator at the first collective.
        """
        self.rank = rank
        self.device = device
        self._timeout_s = rendezvous.timeout_s
        self._epoch = rendezvous.epoch
        self._channels: dict[int, _Channel] = {}
        deadline = time.monotonic() + rendezvous.timeout_s
        try:
            for number in (sender,) if rank == self.SENDER else range(rendezvous.num_senders):
                self._channels[number] = _open_channel(rendezvous, rank, number, device)
                first = torch.zeros(1, dtype=torch.uint8, device=device)
                self._begin(number, first, "the first byte", deadline - time.monotonic())()
        except BaseException:
            self.close()
            raise

    def broadcast(self, buffer: torch.Tensor, what: str) -> None:
        """Sends `buffer` (rank 0), or fills it in place from the first sender (others); returns when the bytes arrived.
        Ordered on the caller's stream: begins after work queued before, and work queued later sees the bytes."""
        self._begin(next(iter(self._channels), 0), buffer, what, self._timeout_s)()

    def receive(
        self,
        manifest: Manifest,
        bucket_bytes: int,
        *,
        keeps: bool,
        into: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, tensor) of a push of whole tensors, in the manifest's order.

        With `keeps` the tensors stay valid; otherwise each is valid until the next one, and all use the memory of one
        bucket. A tensor with its own bucket is received into the tensor of the same name in `into` and not yielded, if
        that has its shape, its dtype and no gaps. A receiver that stops before the end leaves the group.
        """
        try:
            yield from self._buckets(manifest, bucket_bytes, keeps=keeps, into=into)
        except BaseException:  # also of a consumer that fails
            self.close()
            raise

    def _buckets(
        self, manifest: Manifest, bucket_bytes: int, *, keeps: bool, into: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        buckets, digests = list(manifest.buckets(bucket_bytes)), []
        num_senders = max(1, len(self._channels))
        memory = [torch.empty(0, dtype=torch.uint8, device=self.device) for _ in range(num_senders)]
        arriving: deque[tuple[torch.Tensor, bool, Callable[[], None]]] = deque()

        def begin(index: int) -> None:
            bucket, sender = buckets[index], index % num_senders
            filled = lone_bytes(bucket, into)
            is_held = filled is not None
            if filled is None:
                # One buffer for each sender: its tensors are loaded before its next broadcast overwrites it.
                if keeps or memory[sender].numel() < bucket.num_bytes:
                    memory[sender] = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self.device)
                filled = memory[sender][: bucket.num_bytes]
            what = f"weight bucket {index} ({bucket.num_bytes} bytes)"
            arriving.append((filled, is_held, self._begin(sender, filled, what, self._timeout_s)))

        for index in range(min(num_senders, len(buckets))):
            begin(index)
        for index, bucket in enumerate(buckets):
            filled, is_held, wait = arriving.popleft()
            wait()
            if not is_held:
                yield from unpack(bucket, filled)
            digests.append(digest(filled))  # after its tensors were used, to detect memory that was reused too early
            if index + num_senders < len(buckets):
                begin(index + num_senders)
        for sender in range(min(num_senders, len(buckets))):
            arrived = digests[sender::num_senders]
            sent = torch.empty(len(arrived), dtype=torch.int64, device=self.device)
            self._begin(sender, sent, DIGESTS, self._timeout_s)()
            check_arrival(buckets[sender::num_senders], sent, arrived)

    def receive_changes(self, manifest: Manifest, bucket_bytes: int, base: Base, version: int) -> None:
        """Applies a push of payload `delta` to the tensors of `base`, which then is `version`. A receiver that fails
        leaves the group."""
        try:
            base.check(manifest.base_version)
            with base.changing_to(version):
                self._receive_changes(manifest, bucket_bytes, base.tensors)
        except BaseException:
            self.close()
            raise

    def _receive_changes(self, manifest: Manifest, bucket_bytes: int, tensors: Mapping[str, torch.Tensor]) -> None:
        buckets, num_senders = list(manifest.buckets(bucket_bytes)), max(1, len(self._channels))
        for first in range(0, len(buckets), num_senders):
            # The buckets of a round travel in parallel, one from each sender.
            headers, bodies = [], []
            for sender, bucket in enumerate(buckets[first : first + num_senders]):
                header = torch.empty(len(bucket.slots), HEADER, dtype=torch.int64, device=self.device)
                what = f"the header of weight bucket {first + sender}"
                headers.append((bucket, header, self._begin(sender, header, what, self._timeout_s)))
            for sender, (bucket, header, wait) in enumerate(headers):
                wait()
                rows = header.tolist()
                body = torch.empty(offsets(bucket, rows)[-1], dtype=torch.uint8, device=self.device)
                what = f"the changes of weight bucket {first + sender} ({body.numel()} bytes)"
                has_body = body.numel() > 0
                bodies.append((bucket, rows, body, has_body and self._begin(sender, body, what, self._timeout_s)))
            for bucket, rows, body, arrive in bodies:
                if arrive:
                    arrive()
                wrong = apply_bucket(bucket, rows, body, tensors)
                if wrong:
                    named = ", ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else "")
                    raise WeightSyncError(
                        f"{len(wrong)} tensors differ from the learner's after its changes were applied ({named})"
                    )

    def _begin(self, sender: int, buffer: torch.Tensor, what: str, timeout_s: float) -> Callable[[], None]:
        """Begins one broadcast; returns a function that waits for its end."""
        if sender not in self._channels:
            raise WeightSyncError(f"{what}: this member has left transfer epoch {self._epoch}")
        channel = self._channels[sender]
        streams = torch.get_device_module(buffer.device)  # of the CPU: a null object
        stream = streams.current_stream()  # of this thread; the helper thread has another

        def broadcast() -> None:
            with streams.stream(stream):
                channel.move(buffer, timedelta(seconds=timeout_s))

        # On a helper thread: a collective cannot be cancelled, and this thread has to keep its deadline.
        running = channel.thread.submit(broadcast)

        def wait() -> None:
            try:
                running.result(timeout_s)
            except FutureTimeoutError as error:
                self.close()
                waited = f"waited {self._timeout_s:g} s for {what} in transfer epoch {self._epoch}"
                raise WeightSyncError(waited) from error
            except (RuntimeError, OSError) as error:
                self.close()
                raise WeightSyncError(f"{what} failed in transfer epoch {self._epoch}: {error}") from error

        return wait

    def close(self) -> None:
        """Leaves the group; does nothing the second time. Over gloo the other members fail at once, over NCCL at their
        deadline. A hanging NCCL collective cannot be cancelled but aborted: its kernels end, and the memory is free."""
        channels, self._channels = self._channels, {}
        aborting = []
        for sender, channel in channels.items():
            aborting.append(Thread(target=channel.close, name=f"abort-{self._epoch}-{sender}", daemon=True))
            aborting[-1].start()
        deadline = time.monotonic() + ABORT_S
        for thread in aborting:
            thread.join(max(0.0, deadline - time.monotonic()))


def _open_channel(rendezvous: Rendezvous, rank: int, sender: int, device: torch.device) -> _Channel:
    if rendezvous.transport not in ("gloo", "nccl"):
        raise WeightSyncError(f"resources.transport={rendezvous.transport} is unknown: use gloo or nccl")
    timeout_s, prefix = rendezvous.timeout_s, f"transfer-epoch-{rendezvous.epoch}-sender-{sender}"
    try:
        store = join_store(rendezvous.host, rendezvous.port, prefix, timeout_s)
        with listener() as listening:
            here = Location.here(device, listening.getsockname(), shares=rendezvous.same_host == "memory")
            # NCCL's init has no deadline and cannot be aborted, so it begins after all members arrived.
            texts = wait_for_members(store, rank, rendezvous.world_size, timeout_s, json.dumps(asdict(here)))
            members = [Location(**json.loads(text)) for text in texts]
            ways = {n: members[0].way_to(member, rendezvous.transport) for n, member in enumerate(members) if n > 0}
            apart = [n for n, way in ways.items() if way == "network"]
            near = {n: way for n, way in ways.items() if way != "network"}
            rings: tuple[RingWriter | RingReader, ...] = ()
            if rank == TransferGroup.SENDER and near:
                rings = share(listening, near, device, timeout_s)
            elif rank in near:
                rings = (join(members[0].address, rank, device, timeout_s),)
        group = None
        if apart and rank not in near:
            group = _open_group(rendezvous, store, [TransferGroup.SENDER, *apart].index(rank), 1 + len(apart))
    except (RuntimeError, OSError) as error:
        raise WeightSyncError(
            f"rank {rank} of {rendezvous.world_size} could not join transfer epoch {rendezvous.epoch} at "
            f"{rendezvous.host}:{rendezvous.port} over {rendezvous.transport}: {error}"
        ) from error
    return _Channel(group, rings, DaemonThread(f"transfer-epoch-{rendezvous.epoch}-{sender}"))


def _open_group(rendezvous: Rendezvous, store: dist.Store, rank: int, world_size: int) -> Any:
    timeout = timedelta(seconds=rendezvous.timeout_s)
    if rendezvous.transport == "gloo":
        return dist.ProcessGroupGloo(store, rank, world_size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 2 * timeout  # ours ends first
    with environment_variables(WITHOUT_WATCHDOG):
        return dist.ProcessGroupNCCL(store, rank, world_size, options)


def lone_bytes(bucket: Bucket, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Returns the bytes, uint8, of the only tensor of a bucket in the memory of `tensors`; None if the bucket has more
    tensors, or that memory another layout."""
    spec = bucket.slots[0].spec
    if len(bucket.slots) > 1 or spec.name not in tensors:
        return None
    tensor = tensors[spec.name].detach()
    fits = tensor.dtype is getattr(torch, spec.dtype) and tuple(tensor.shape) == spec.shape and tensor.is_contiguous()
    return tensor.view(-1).view(torch.uint8) if fits else None


def pack(bucket: Bucket, tensors: dict[str, torch.Tensor], buffer: torch.Tensor) -> torch.Tensor:
    """Copies the tensors of a bucket into the front of `buffer` (uint8); returns the filled part."""
    for slot in bucket.slots:
        part = buffer[slot.offset : slot.offset + slot.spec.num_bytes]
        part.view(getattr(torch, slot.spec.dtype)).view(slot.spec.shape).copy_(tensors[slot.spec.name].detach())
    return buffer[: bucket.num_bytes]


def unpack(bucket: Bucket, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Returns name and view of each tensor in a filled bucket; the views share the buffer's memory."""
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
    """Returns a packed bucket as uint8 in host memory, followed by its digest in `DIGEST_BYTES`."""
    return torch.cat([packed.cpu(), digest(packed).cpu().reshape(1).view(torch.uint8)]).numpy()


def unpack_all(
    manifest: Manifest, bucket_bytes: int, packed: Iterable[np.ndarray]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) of an exported push, whose buckets are followed by their digests."""
    buckets, sent, arrived = list(manifest.buckets(bucket_bytes)), [], []
    for bucket, data in zip(buckets, packed, strict=True):
        filled = torch.from_numpy(data[: bucket.num_bytes].copy())
        yield from unpack(bucket, filled)
        sent.append(torch.from_numpy(data[-DIGEST_BYTES:].copy()).view(torch.int64)[0])
        arrived.append(digest(filled))
    if buckets:
        check_arrival(buckets, torch.stack(sent), arrived)


def check_arrival(buckets: Sequence[Bucket], sent: torch.Tensor, arrived: Sequence[torch.Tensor]) -> None:
    """Compares the sender's digests, int64 [number of buckets], with those of the received bytes."""
    is_other = (sent != torch.stack(list(arrived))).tolist()
    wrong = [bucket for bucket, differs in zip(buckets, is_other, strict=True) if differs]
    if wrong:
        named = ", ".join(_named(bucket) for bucket in wrong[:3]) + (", ..." if len(wrong) > 3 else "")
        raise WeightSyncError(
            f"{len(wrong)} of {len(buckets)} weight buckets did not arrive as they were sent ({named})"
        )


def _named(bucket: Bucket) -> str:
    first, others = bucket.slots[0].spec.name, len(bucket.slots) - 1
    return f"{first} and {others} more tensors" if others else first
