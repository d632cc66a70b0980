"""Transfer groups of GPUs: order of streams, and members over NCCL or CUDA IPC that die or hang."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transfer_members as transfer
from gpus import NUM_GPUS, ON_A_GPU, two_gpus

from mobula.cluster.weight_sync.shared_ring import RingWriter
from mobula.cluster.weight_sync.transport import TransferGroup

TIMEOUT_S = 20.0  # the first communicator of a process takes seconds
KERNEL_CYCLES = 50_000_000  # some 30 ms: far longer than a bucket takes

pytestmark = [*ON_A_GPU, pytest.mark.slow, pytest.mark.timeout(600)]
three_gpus = pytest.mark.skipif(NUM_GPUS < 3, reason="needs three GPUs: one for the member that outlives another")


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.mark.parametrize(
    ("transport", "receiver"), [("gloo", "cuda:0"), pytest.param("nccl", "cuda:1", marks=two_gpus)]
)
def test_a_bucket_is_sent_after_it_was_packed_and_filled_again_after_it_was_read(transport: str, receiver: str) -> None:
    """Both sides queue slow kernels on streams of their own, and use one buffer for all buckets."""
    transfers = transfer.Transfers(transport, "cuda:0", TIMEOUT_S)  # keeps the store
    at = transfers.open(1)
    values = list(range(1, 9))

    def on_a_stream(rank: int, device: str, step: Callable[[torch.Tensor, int], None]) -> torch.Tensor:
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            group = TransferGroup(at, rank, torch.device(device))
            buffer = torch.zeros(transfer.NUM_BYTES, dtype=torch.uint8, device=device)
            for value in values:
                if rank == TransferGroup.SENDER:
                    step(buffer, value)
                group.broadcast(buffer, f"bucket {value}")
                if rank != TransferGroup.SENDER:
                    step(buffer, value)
            stream.synchronize()
            group.close()
            return buffer

    kept: list[torch.Tensor] = []

    def pack(buffer: torch.Tensor, value: int) -> None:
        torch.cuda._sleep(KERNEL_CYCLES)
        buffer.fill_(value)

    def read(buffer: torch.Tensor, value: int) -> None:
        torch.cuda._sleep(KERNEL_CYCLES)
        kept.append(buffer.clone())

    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(on_a_stream, 0, "cuda:0", pack), threads.submit(on_a_stream, 1, receiver, read)]
        for side in both:
            side.result(TIMEOUT_S * 3)
    assert [tensor.unique().tolist() for tensor in kept] == [[value] for value in values]


@two_gpus
def test_members_that_do_not_come_are_named() -> None:
    transfer.names_who_is_missing(transfer.Transfers("nccl", "cuda:0", TIMEOUT_S))


@two_gpus
def test_a_kill_of_the_only_receiver() -> None:
    with transfer.members("cuda:1", "cuda:1") as (killed, fresh):
        transfer.survives_a_kill(transfer.Transfers("nccl", "cuda:0", TIMEOUT_S), killed, [], [fresh])


@three_gpus
def test_a_kill_of_one_receiver_of_two() -> None:
    with transfer.members("cuda:1", "cuda:2", "cuda:1") as (killed, other, fresh):
        transfer.survives_a_kill(transfer.Transfers("nccl", "cuda:0", TIMEOUT_S), killed, [other], [fresh])


@two_gpus
def test_a_death_before_the_first_byte() -> None:
    with transfer.members("cuda:1", "cuda:1") as (dying, fresh):
        transfers = transfer.Transfers("nccl", "cuda:0", TIMEOUT_S)
        transfer.survives_a_death_before_the_first_byte(transfers, dying, [])
        transfers.delivers([fresh])


@two_gpus
def test_a_member_that_hangs() -> None:
    with transfer.members("cuda:1") as (hanging,):
        transfer.survives_a_hang(transfer.Transfers("nccl", "cuda:0", TIMEOUT_S), hanging)


def test_processes_on_one_gpu_exchange_handles() -> None:
    """Bytes go through device memory; a killed reader and a killed sender leave the others able to meet again."""
    with transfer.members("cuda:0", "cuda:0", "cuda:0", "cuda:0") as (killed, other, fresh, sender):
        transfers = transfer.Transfers("gloo", "cuda:0", TIMEOUT_S)
        group = transfers.meet([killed, other])
        [ring] = group._channels[0].rings
        assert isinstance(ring, RingWriter) and ring._chunks.is_cuda
        group.close()
        transfers.delivers([killed, other])
        transfer.survives_a_kill(transfers, killed, [other], [fresh])
        transfer.survives_a_kill_of_the_sender(transfers, sender, [other, fresh])
