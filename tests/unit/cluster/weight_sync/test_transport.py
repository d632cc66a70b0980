"""The transfer group over gloo and over shared memory: bytes arrive as sent, no rank waits longer than the deadline."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mobula.cluster.environment_variables import environment_variables
from mobula.cluster.errors import DeadlineError, WeightSyncError
from mobula.cluster.weight_sync import shared_ring, transport
from mobula.cluster.weight_sync import shared_ring as cuda_memory
from mobula.cluster.weight_sync.manifest import Manifest, TensorSpec
from mobula.cluster.weight_sync.shared_ring import DeviceMemory
from mobula.cluster.weight_sync.transport import Rendezvous, RendezvousStore, TransferGroup, pack, unpack, unpack_all
from mobula.learner.weight_publisher import WeightPublisher

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture(params=["memory", "network"], autouse=True)
def same_host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members share memory, or are on a host that can share none."""
    if request.param == "network":
        monkeypatch.setattr(shared_ring, "host_name", lambda: "")


@pytest.fixture
def store() -> RendezvousStore:
    return RendezvousStore(timeout_s=30)


def rendezvous(store: RendezvousStore, epoch: int = 1, world_size: int = 3, timeout_s: float = 20) -> Rendezvous:
    return Rendezvous(store.host, store.port, epoch, world_size, "gloo", timeout_s)


def together(*calls: Callable[[], object]) -> list:
    """Results of calls that wait for each other."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]


def meet(at: Rendezvous) -> list[TransferGroup]:
    return together(*(lambda rank=rank: TransferGroup(at, rank, CPU) for rank in range(at.world_size)))


def broadcast(members: list[TransferGroup], buffers: list[torch.Tensor]) -> None:
    together(*(lambda m=m, b=b: m.broadcast(b, "a bucket") for m, b in zip(members, buffers, strict=True)))


def test_all_receivers_get_the_bytes_of_the_sender(store: RendezvousStore) -> None:
    members = meet(rendezvous(store))
    for seed in range(3):
        sent = torch.randint(0, 256, (1000 + seed,), dtype=torch.uint8)
        received = [torch.zeros_like(sent) for _ in range(2)]
        broadcast(members, [sent, *received])
        assert all(torch.equal(buffer, sent) for buffer in received)
    for member in members:
        member.close()


def test_receivers_on_other_hosts_get_bytes_over_gloo(store: RendezvousStore, monkeypatch: pytest.MonkeyPatch) -> None:
    at, thread = rendezvous(store, world_size=4), threading.local()
    monkeypatch.setattr(shared_ring, "host_name", lambda: thread.host)

    def member(rank: int) -> TransferGroup:
        thread.host = "there" if rank == 2 else "here"
        return TransferGroup(at, rank, CPU)

    members = together(*(lambda rank=rank: member(rank) for rank in range(4)))
    channels = [group._channels[0] for group in members]
    assert [channel.group is None for channel in channels] == [False, True, False, True]
    assert [len(channel.rings) for channel in channels] == [1, 1, 0, 1]
    sent = torch.randint(0, 256, ((9 << 20) + 5,), dtype=torch.uint8)  # more than a ring's chunk
    received = [torch.zeros_like(sent) for _ in range(3)]
    for _ in range(4):
        broadcast(members, [sent, *received])
    assert all(torch.equal(buffer, sent) for buffer in received)
    for group in members:
        group.close()


@pytest.mark.parametrize("opens", [True, False])
def test_a_receiver_on_the_senders_gpu_opens_its_memory_or_reads_host_memory(
    opens: bool, store: RendezvousStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver is faked."""
    memory, freed = torch.zeros(4 * shared_ring.CHUNK_BYTES["cuda"], dtype=torch.uint8), []

    def shared(end: str) -> DeviceMemory:
        if end == "opened" and not opens:
            raise OSError("no handle for this process")
        return DeviceMemory(memory, b"handle", lambda: freed.append(end))

    monkeypatch.setattr(shared_ring.Location, "way_to", lambda *_: "device")
    monkeypatch.setattr(cuda_memory, "create", lambda *_: shared("created"))
    monkeypatch.setattr(cuda_memory, "open_handle", lambda *_: shared("opened"))
    members = meet(rendezvous(store))
    sent = torch.randint(0, 256, (1000,), dtype=torch.uint8)
    received = [torch.zeros_like(sent) for _ in range(2)]
    broadcast(members, [sent, *received])
    assert all(torch.equal(buffer, sent) for buffer in received)
    bucket = memory.view(4, -1)[1, :1000]  # the group's first byte took the first chunk
    assert torch.equal(bucket, sent) is opens
    for member in reversed(members):
        member.close()
    assert freed.count("opened") == 2 * opens


def test_groups_of_different_epochs_at_one_store_never_meet(store: RendezvousStore) -> None:
    old, new = meet(rendezvous(store, epoch=1, world_size=2)), meet(rendezvous(store, epoch=2, world_size=2))
    sent = {1: torch.full((8,), 1, dtype=torch.uint8), 2: torch.full((8,), 2, dtype=torch.uint8)}
    received = {epoch: torch.zeros(8, dtype=torch.uint8) for epoch in sent}
    broadcast([*new, *old], [sent[2], received[2], sent[1], received[1]])
    assert torch.equal(received[1], sent[1])
    assert torch.equal(received[2], sent[2])


def test_a_member_that_stays_away_ends_the_wait_of_the_others_in_time(store: RendezvousStore) -> None:
    at, started = rendezvous(store, world_size=2, timeout_s=1), time.monotonic()
    with pytest.raises(WeightSyncError, match=r"rank 0 of 2 could not join transfer epoch 1 at .* over gloo"):
        TransferGroup(at, 0, CPU)
    assert time.monotonic() - started < 15


def test_a_sender_that_sends_nothing_ends_the_wait_of_its_receivers_in_time(store: RendezvousStore) -> None:
    sender, receiver = meet(rendezvous(store, world_size=2, timeout_s=4))
    started = time.monotonic()
    with pytest.raises((DeadlineError, WeightSyncError), match=r"weight bucket 3 .*transfer epoch 1"):
        receiver.broadcast(torch.zeros(8, dtype=torch.uint8), "weight bucket 3 (8 bytes)")
    assert time.monotonic() - started < 15
    assert sender.rank == TransferGroup.SENDER


def test_a_receiver_that_fails_within_a_push_leaves_and_its_sender_does_not_wait(store: RendezvousStore) -> None:
    manifest = Manifest(tuple(TensorSpec(f"t{n}", (4,), "float32") for n in range(3)))
    sender, receiver = meet(rendezvous(store, world_size=2))
    bucket = torch.zeros(16, dtype=torch.uint8)

    def load() -> None:
        for name, _ in receiver.receive(manifest, 16, keeps=True):
            raise ValueError(f"no such tensor: {name}")

    with pytest.raises(ValueError, match="no such tensor: t0"):
        together(load, lambda: sender.broadcast(bucket, "weight bucket 0"))
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"weight bucket 1 failed in transfer epoch 1"):
        while True:  # bytes for a closed socket may leave before the system reports it
            sender.broadcast(bucket, "weight bucket 1")
    assert time.monotonic() - started < 10, "well before the deadline of 20 s"
    for member, name in ((sender, "weight bucket 2"), (receiver, "weight bucket 2")):
        with pytest.raises(WeightSyncError, match=rf"{name}: this member has left transfer epoch 1"):
            member.broadcast(bucket, name)


def test_a_broadcast_is_ordered_on_its_callers_stream(store: RendezvousStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of devices with streams: collectives wait for the current stream of the thread that starts them."""
    sender, receiver = meet(rendezvous(store, world_size=2))
    entered: list[tuple[str, str]] = []
    both_began = threading.Barrier(2)  # a sender that has ended would lend its thread to the receiver

    class Streams:
        def current_stream(self) -> str:
            both_began.wait(20)
            return f"stream of {threading.current_thread().name}"

        @contextmanager
        def stream(self, stream: str) -> Iterator[None]:
            entered.append((threading.current_thread().name, stream))
            yield

    monkeypatch.setattr(torch, "get_device_module", lambda device: Streams())
    broadcast([sender, receiver], [torch.ones(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)])
    assert {helper for helper, _ in entered} == {"transfer-epoch-1-0"}
    assert len({stream for _, stream in entered}) == 2 and "stream of transfer-epoch-1-0" not in dict(entered).values()


def test_the_environment_of_other_groups_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
    with environment_variables(transport.WITHOUT_WATCHDOG):
        assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "0"
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT")
    with environment_variables(transport.WITHOUT_WATCHDOG):
        pass
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ


def test_a_store_without_a_server_is_named(store: RendezvousStore) -> None:
    nowhere = replace(rendezvous(store, timeout_s=1), port=1)
    with pytest.raises(WeightSyncError, match=r"could not join transfer epoch 1 at .*:1 over gloo"):
        TransferGroup(nowhere, 1, CPU)


PUSHED = Manifest(
    (
        TensorSpec("norm", (64,), "bfloat16"),
        TensorSpec("bias", (64,), "float32"),
        TensorSpec("embed", (1024, 1024), "float32"),  # travels alone
        TensorSpec("head", (64, 64), "bfloat16"),
    )
)


def pushed_weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {s.name: torch.randn(s.shape, generator=generator).to(getattr(torch, s.dtype)) for s in PUSHED.tensors}


def publisher(manifest: Manifest, weights: Callable[[], Iterator], rank: int = 0, **ranks: int) -> WeightPublisher:
    return WeightPublisher(manifest, weights, rank=rank, device=CPU, transport="gloo", timeout_s=20.0, **ranks)


class Push:
    """One sender and one receiver."""

    def __init__(self, weights: dict[str, torch.Tensor], manifest: Manifest = PUSHED) -> None:
        self.manifest = manifest
        self.publisher = publisher(manifest, lambda: iter(weights.items()))
        at = self.publisher.open_transfer(1, 1)
        _, self.receiver = together(lambda: self.publisher.join_transfer(at), lambda: TransferGroup(at, 1, CPU))

    def send(self, take: Callable[[str, torch.Tensor], None] = lambda *_: None, **how: Any) -> None:
        def receive() -> None:
            for name, tensor in self.receiver.receive(self.manifest, 1 << 14, **how):
                take(name, tensor)

        together(lambda: self.publisher.send(1 << 14, 1), receive)


@pytest.mark.parametrize(("name", "place"), [("norm", 3), ("bias", 0), ("embed", 1023), ("head", 63)])
@pytest.mark.parametrize("holds", [True, False])
def test_a_row_that_arrives_stale_is_named(name: str, place: int, holds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On its way one row (or one number of a vector) becomes that of the push before. With `holds` tensors that travel
    alone arrive in the receiver's own."""
    new, old = pushed_weights(1), pushed_weights(0)
    buckets = list(PUSHED.buckets(1 << 14))
    [index] = [n for n, b in enumerate(buckets) if any(slot.spec.name == name for slot in b.slots)]
    new[name][place] = new[name][place] + 1
    stale = new | {name: new[name].clone()}
    stale[name][place] = old[name][place]
    carry = TransferGroup.broadcast

    def stale_on_the_way(self: TransferGroup, buffer: torch.Tensor, what: str) -> None:
        if self.rank == TransferGroup.SENDER and what.startswith(f"weight bucket {index} "):
            buffer = pack(buckets[index], stale, torch.empty_like(buffer))
        carry(self, buffer, what)

    push = Push(new)
    push.send(keeps=True)
    monkeypatch.setattr(TransferGroup, "broadcast", stale_on_the_way)
    into = {key: torch.empty_like(tensor) for key, tensor in new.items()} if holds else {}
    first = buckets[index].slots[0].spec.name
    with pytest.raises(WeightSyncError, match=rf"1 of 3 weight buckets did not arrive as they were sent \({first}"):
        push.send(keeps=False, into=into)


def test_memory_that_is_overwritten_before_its_tensor_was_copied_is_named() -> None:
    def overwrite(name: str, tensor: torch.Tensor) -> None:
        if name == "head":
            tensor[5].zero_()

    with pytest.raises(WeightSyncError, match=r"1 of 3 weight buckets did not arrive as they were sent \(head\)"):
        Push(pushed_weights(0)).send(overwrite, keeps=True)


@pytest.mark.parametrize("num_senders", [2, 3])
@pytest.mark.parametrize("holds", [True, False])
def test_several_senders_send_a_part_of_the_buckets_each(num_senders: int, holds: bool) -> None:
    """Of 7 buckets of one to four tensors, which no number of senders divides."""
    specs = [TensorSpec(f"t{n}", (64, 64 * (1 + n % 4)), "float32") for n in range(7)]
    specs[3:4] = [TensorSpec(f"small{n}", (8,), "bfloat16") for n in range(4)]
    manifest = Manifest(tuple(specs))
    weights = {s.name: torch.randn(s.shape).to(getattr(torch, s.dtype)) for s in specs}
    gathered: list[list[str]] = [[] for _ in range(num_senders)]

    def named(rank: int) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():
            gathered[rank].append(name)
            yield name, tensor

    publishers = [  # of four ranks: those after the senders gather alone
        publisher(manifest, lambda rank=rank: named(rank), rank, num_ranks=4, num_senders=num_senders)
        for rank in range(num_senders)
    ]
    at = publishers[0].open_transfer(1, 2)
    joining = [lambda p=p: p.join_transfer(at) for p in publishers]
    receivers = together(*joining, *(lambda r=r: TransferGroup(at, r, CPU) for r in (1, 2)))[num_senders:]
    into = {name: torch.empty_like(tensor) for name, tensor in weights.items()} if holds else {}

    def take(receiver: TransferGroup) -> dict[str, torch.Tensor]:
        return {**into, **{n: t.clone() for n, t in receiver.receive(manifest, 1 << 14, keeps=False, into=into)}}

    sending = [lambda p=p: p.send(1 << 14, 1) for p in publishers]
    for taken in together(*sending, lambda: take(receivers[0]), lambda: take(receivers[1]))[num_senders:]:
        assert all(torch.equal(taken[name], weights[name]) for name in weights)
    assert all(names == list(weights) for names in gathered), "each rank takes part in gathering all of them"
    for member in (*publishers, *receivers):
        member.close()


def test_one_of_two_senders_that_leaves_fails_the_push_for_all(store: RendezvousStore) -> None:
    at = replace(rendezvous(store, world_size=2, timeout_s=20), num_senders=2)
    senders = [lambda number=number: TransferGroup(at, 0, CPU, sender=number) for number in (0, 1)]
    first, second, receiver = together(*senders, lambda: TransferGroup(at, 1, CPU))
    manifest = Manifest(tuple(TensorSpec(f"t{n}", (1 << 20,), "float32") for n in range(4)))
    bucket = torch.zeros(manifest.tensors[0].num_bytes, dtype=torch.uint8)
    second.close()
    started = time.monotonic()

    def send() -> None:
        while True:  # the receiver leaves once it has noticed
            first.broadcast(bucket, "weight bucket 0")

    def receive() -> None:
        with pytest.raises(WeightSyncError, match="weight bucket 1 .*failed in transfer epoch 1"):
            list(receiver.receive(manifest, bucket.numel(), keeps=True))

    with pytest.raises(WeightSyncError):
        together(receive, send)
    assert time.monotonic() - started < 10, "well before the deadline of 20 s"


def test_an_exported_push_is_compared_as_well() -> None:
    weights = pushed_weights(0)
    packed = Push(weights).publisher.export(1 << 14)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in unpack_all(PUSHED, 1 << 14, packed))
    packed[0][9] ^= 1
    with pytest.raises(WeightSyncError, match=r"1 of 3 weight buckets .*\(norm and 1 more tensors\)"):
        list(unpack_all(PUSHED, 1 << 14, packed))


def test_a_push_of_nothing_arrives() -> None:
    Push({}, Manifest(())).send(lambda name, tensor: pytest.fail(name), keeps=True)


def test_an_unknown_transport_is_refused(store: RendezvousStore) -> None:
    with pytest.raises(WeightSyncError, match=r"resources\.transport=pigeon is unknown: use gloo or nccl"):
        TransferGroup(replace(rendezvous(store), transport="pigeon"), 0, CPU)


def test_a_group_may_be_closed_twice(store: RendezvousStore) -> None:
    """A member whose next rendezvous failed still holds the group that it left."""
    with ExitStack() as leaving:
        for member in meet(rendezvous(store, world_size=2)):
            leaving.callback(member.close)
            leaving.callback(member.close)


def test_a_rendezvous_survives_its_wire_form(store: RendezvousStore) -> None:
    at = rendezvous(store)
    assert Rendezvous(**at.to_wire()) == at


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(1, 5), max_size=3), st.sampled_from(["float32", "bfloat16"])), max_size=8),
    st.integers(1, 300),
)
def test_tensors_come_out_of_their_buckets_as_they_went_in(shapes: list, max_bytes: int) -> None:
    manifest = Manifest(tuple(TensorSpec(f"t{n}", tuple(shape), dtype) for n, (shape, dtype) in enumerate(shapes)))
    tensors = {spec.name: torch.randn(spec.shape).to(getattr(torch, spec.dtype)) for spec in manifest.tensors}
    arrived: dict[str, torch.Tensor] = {}
    for bucket in manifest.buckets(max_bytes):
        arrived |= dict(unpack(bucket, pack(bucket, tensors, torch.empty(bucket.num_bytes, dtype=torch.uint8))))
    assert arrived.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert arrived[name].dtype == tensor.dtype
        assert torch.equal(arrived[name], tensor)


def test_packing_casts_to_the_dtype_of_the_manifest_and_takes_views() -> None:
    [bucket] = Manifest((TensorSpec("t", (3, 2), "bfloat16"),)).buckets(1 << 20)
    master = torch.randn(2, 3).T  # not contiguous
    [(_, arrived)] = unpack(bucket, pack(bucket, {"t": master}, torch.empty(64, dtype=torch.uint8)))
    assert torch.equal(arrived, master.to(torch.bfloat16))
