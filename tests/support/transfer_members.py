"""Members of transfer groups in processes of their own, which can be killed, stopped and continued."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from mobula.cluster.errors import WeightSyncError
from mobula.cluster.weight_sync.shared_ring import Location
from mobula.cluster.weight_sync.transport import (
    Rendezvous,
    RendezvousStore,
    TransferGroup,
    join_store,
    wait_for_members,
)

ANSWER_S = 240.0  # a process on busy cores takes a minute to import torch


class Member:
    """A receiver in a process of its own; calls begin at once, and `outcome` waits for the oldest of them."""

    def __init__(self, device: str) -> None:
        processes = multiprocessing.get_context("spawn")
        self._pipe, theirs = processes.Pipe()
        self._process = processes.Process(target=_serve, args=(theirs, device), daemon=True)
        self._process.start()
        theirs.close()

    def join(self, at: Rendezvous, rank: int) -> None:
        """Join a transfer group; the outcome is None."""
        self._pipe.send(("join", at, rank))

    def vanish(self, at: Rendezvous, rank: int) -> None:
        """Arrive at the rendezvous and die before the group is made; there is no outcome."""
        self._pipe.send(("vanish", at, rank))

    def send(self, num_bytes: int) -> None:
        """As rank 0, send buckets of ones for ever; the outcome is an error."""
        self._pipe.send(("send", num_bytes))

    def receive(self, num_bytes: int) -> None:
        """Receive buckets until one holds 0 alone; the outcome is the sum of the bytes of each."""
        self._pipe.send(("receive", num_bytes))

    def outcome(self) -> Any:
        """The result of a call, or its error as text."""
        assert self._pipe.poll(ANSWER_S), "no answer"
        return self._pipe.recv()

    def signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)
        if number == signal.SIGKILL:
            self._process.join()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def end(self) -> None:
        self._process.kill()
        self._process.join()


@contextmanager
def members(*devices: str) -> Iterator[list[Member]]:
    """One member on each device."""
    started = [Member(device) for device in devices]
    try:
        assert [member.outcome() for member in started] == [None] * len(devices), "they did not start"
        yield started
    finally:
        for member in started:
            member.end()


def _serve(pipe: Connection, device: str) -> None:
    group: TransferGroup | None = None
    pipe.send(None)
    while True:
        match pipe.recv():
            case ("join", at, rank):
                if group is not None:
                    group.close()
                try:
                    group = TransferGroup(at, rank, torch.device(device))
                    pipe.send(None)
                except WeightSyncError as error:
                    pipe.send(str(error))
            case ("vanish", at, rank):
                store = join_store(at.host, at.port, f"transfer-epoch-{at.epoch}-sender-0", at.timeout_s)
                here = Location.here(torch.device(device), b"", shares=at.same_host == "memory")
                wait_for_members(store, rank, at.world_size, at.timeout_s, json.dumps(asdict(here)))
                os._exit(1)
            case ("send", num_bytes):
                assert group is not None, "join first"
                buffer = torch.ones(num_bytes, dtype=torch.uint8, device=device)
                try:
                    while True:
                        group.broadcast(buffer, "bucket of 1")
                except WeightSyncError as error:
                    pipe.send(str(error))
            case ("receive", num_bytes):
                try:
                    pipe.send(_received(group, num_bytes, device))
                except WeightSyncError as error:
                    pipe.send(str(error))


def _received(group: TransferGroup | None, num_bytes: int, device: str) -> list[int]:
    assert group is not None, "join first"
    sums: list[int] = []
    while not sums or sums[-1] != 0:
        buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        group.broadcast(buffer, f"bucket {len(sums)}")
        sums.append(int(buffer.sum(dtype=torch.int64)))
    return sums


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
