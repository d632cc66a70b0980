"""Faults of members of a transfer group, over any transport: each ends within the deadline, and a new epoch works."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transfer_members import Member

from mobula.cluster.errors import WeightSyncError
from mobula.cluster.weight_sync.transport import Rendezvous, RendezvousStore, TransferGroup

MARGIN_S = 15.0  # for an abort, and for busy cores
NUM_BYTES = 1 << 20


class Transfers:
    """A sender in this process, and its groups of one epoch after the other."""

    def __init__(self, transport: str, device: str, timeout_s: float, same_host: str = "memory") -> None:
        self.timeout_s = timeout_s
        self._same_host = same_host
        self._transport = transport
        self._device = torch.device(device)
        self._epoch = 0
        self._store = RendezvousStore(timeout_s)

    def open(self, num_receivers: int) -> Rendezvous:
        """Where the next group meets."""
        self._epoch += 1
        host, port, size = self._store.host, self._store.port, 1 + num_receivers
        return Rendezvous(host, port, self._epoch, size, self._transport, self.timeout_s, same_host=self._same_host)

    def meet(self, receivers: Sequence[Member]) -> TransferGroup:
        """A group of the sender and exactly these."""
        at = self.open(len(receivers))
        for rank, receiver in enumerate(receivers, start=1):
            receiver.join(at, rank)
        group = self.join(at)
        assert [receiver.outcome() for receiver in receivers] == [None] * len(receivers)
        return group

    def join(self, at: Rendezvous) -> TransferGroup:
        return TransferGroup(at, TransferGroup.SENDER, self._device)

    def send(self, group: TransferGroup, value: int) -> None:
        group.broadcast(torch.full((NUM_BYTES,), value, dtype=torch.uint8, device=self._device), f"bucket of {value}")

    def delivers(self, receivers: Sequence[Member]) -> None:
        """A whole push arrives in a group of a new epoch."""
        group = self.meet(receivers)
        for receiver in receivers:
            receiver.receive(NUM_BYTES)
        for value in (3, 7, 0):
            self.send(group, value)
        assert [receiver.outcome() for receiver in receivers] == [[3 * NUM_BYTES, 7 * NUM_BYTES, 0]] * len(receivers)
        group.close()


def survives_a_kill(transfers: Transfers, killed: Member, others: Sequence[Member], fresh: Sequence[Member]) -> None:
    """A receiver is killed between two buckets. `fresh` join the `others` in the next epoch."""
    group = transfers.meet([killed, *others])
    for receiver in (killed, *others):
        receiver.receive(NUM_BYTES)
    transfers.send(group, 1)
    killed.signal(signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"bucket of 2.*transfer epoch"):
        while True:  # over gloo, bytes for the killed one may leave before the system reports that it is gone
            transfers.send(group, 2)
    for receiver in others:
        assert "transfer epoch" in receiver.outcome()
    assert time.monotonic() - started < transfers.timeout_s + MARGIN_S
    assert all(receiver.is_alive for receiver in others)
    transfers.delivers([*others, *fresh])


def survives_a_kill_of_the_sender(transfers: Transfers, killed: Member, receivers: Sequence[Member]) -> None:
    """It is killed in the middle of a push; this process sends in the next epoch."""
    at = transfers.open(len(receivers))
    for rank, member in enumerate((killed, *receivers)):
        member.join(at, rank)
    assert [member.outcome() for member in (killed, *receivers)] == [None] * (1 + len(receivers))
    for receiver in receivers:
        receiver.receive(NUM_BYTES)
    killed.send(NUM_BYTES)
    time.sleep(0.2)  # buckets travel
    started = time.monotonic()
    killed.signal(signal.SIGKILL)
    for receiver in receivers:
        assert "transfer epoch" in receiver.outcome()
    assert time.monotonic() - started < transfers.timeout_s + MARGIN_S
    transfers.delivers(receivers)


def survives_a_death_before_the_first_byte(transfers: Transfers, dying: Member, others: Sequence[Member]) -> None:
    """A receiver has come to the rendezvous and dies before the group is made."""
    at = transfers.open(1 + len(others))
    for rank, receiver in enumerate(others, start=2):
        receiver.join(at, rank)
    dying.vanish(at, 1)
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"transfer epoch"):
        transfers.join(at)
    assert time.monotonic() - started < transfers.timeout_s + MARGIN_S
    for receiver in others:
        assert "transfer epoch" in receiver.outcome()
    if others:
        transfers.delivers(others)


def survives_a_hang(transfers: Transfers, hanging: Member) -> None:
    """The only receiver is stopped in the middle of a push, and continued after the deadline."""
    group = transfers.meet([hanging])
    hanging.receive(NUM_BYTES)
    transfers.send(group, 1)
    hanging.signal(signal.SIGSTOP)
    started = time.monotonic()
    try:
        with pytest.raises(WeightSyncError, match=r"bucket of 2.*transfer epoch"):
            while True:  # the system's buffers take some
                transfers.send(group, 2)
    finally:
        hanging.signal(signal.SIGCONT)
    assert time.monotonic() - started < transfers.timeout_s + MARGIN_S
    assert "transfer epoch" in hanging.outcome()
    transfers.delivers([hanging])


def names_who_is_missing(transfers: Transfers) -> None:
    """No receiver comes."""
    at, started = transfers.open(2), time.monotonic()
    with ThreadPoolExecutor(1) as waiting, pytest.raises(WeightSyncError, match=r"ranks \[1, 2\] did not come"):
        waiting.submit(transfers.join, at).result()
    assert time.monotonic() - started < transfers.timeout_s + MARGIN_S
