"""Members of transfer groups in processes of their own, which can be killed, stopped and continued."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from mobula.cluster.errors import WeightSyncError
from mobula.cluster.weight_sync.shared_ring import Location
from mobula.cluster.weight_sync.transport import Rendezvous, TransferGroup, join_store, wait_for_members

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
                wait_for_members(store, rank, at.world_size, at.timeout_s, here.to_text())
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
