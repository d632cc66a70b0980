"""A push to two receivers on the sender's host, through shared memory and over gloo. Each is a separate process."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import torch

from benchmarks.harness.apart import Peer, apart
from benchmarks.harness.measure import Effort, Measurements, Side, interleave
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.cluster.weight_sync.transport import Rendezvous, TransferGroup
from mobula.configs.schema import RunConfig
from mobula.learner.weight_publisher import WeightPublisher

NUM_RECEIVERS = 2
WAYS: dict[str, Literal["memory", "network"]] = {"memory": "memory", "gloo": "network"}
SENDER = 0
TIMEOUT_S = 60.0
UNIT = "GB/s"


@dataclass(frozen=True)
class Join:
    """Joins the transfer group of `way`; asked without a rendezvous, the sender opens it."""

    way: str
    rendezvous: Rendezvous | None = None


@dataclass(frozen=True)
class Push:
    way: str


@dataclass(frozen=True)
class Moved:
    """On the clock that all processes share."""

    started_s: float
    ended_s: float


class Member:
    """Rank 0 sends tensors filled with their index; the other ranks copy them into their parameters."""

    def __init__(self, manifest: Manifest, bucket_bytes: int, rank: int) -> None:
        torch.set_num_threads(1)
        self._manifest, self._bucket_bytes, self._rank = manifest, bucket_bytes, rank
        self._tensors = {
            spec.name: torch.full(spec.shape, float(index) if rank == SENDER else -1.0)
            for index, spec in enumerate(manifest.tensors)
        }
        self._publishers = {
            way: WeightPublisher(
                manifest,
                lambda: iter(self._tensors.items()),
                rank=SENDER,
                device=torch.device("cpu"),
                transport="gloo",
                timeout_s=TIMEOUT_S,
                same_host=same_host,
            )
            for way, same_host in WAYS.items()
        }
        self._groups: dict[str, TransferGroup] = {}

    def __call__(self, job: Join | Push) -> Rendezvous | Moved | None:
        if isinstance(job, Push):
            return self._timed(job.way)
        if job.rendezvous is None:
            return self._publishers[job.way].open_transfer(0, num_receivers=NUM_RECEIVERS)
        if self._rank == SENDER:
            self._publishers[job.way].join_transfer(job.rendezvous)
        else:
            self._groups[job.way] = TransferGroup(job.rendezvous, self._rank, torch.device("cpu"))
        return None

    def _timed(self, way: str) -> Moved:
        started = time.perf_counter()
        if self._rank == SENDER:
            self._publishers[way].send(self._bucket_bytes, 0)
            return Moved(started, time.perf_counter())
        for tensor in self._tensors.values():
            tensor.view(-1)[:: max(1, tensor.numel() - 1)] = -1.0  # the ends, which the check reads
        received = self._groups[way].receive(self._manifest, self._bucket_bytes, keeps=False, into=self._tensors)
        for name, tensor in received:
            self._tensors[name].copy_(tensor)
        ended = time.perf_counter()
        for index, (name, tensor) in enumerate(self._tensors.items()):
            if not tensor.view(-1)[0] == tensor.view(-1)[-1] == index:
                raise ValueError(f"{name} did not arrive as it was sent")
        return Moved(started, ended)


async def measure_same_host(effort: Effort, config: RunConfig, manifest: Manifest) -> dict[str, Measurements]:
    """GB/s delivered to both receivers together, as "same_host_memory" and "same_host_gloo"."""
    bucket_bytes = config.weight_sync.bucket_bytes
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with (
        apart(Member, manifest, bucket_bytes, 0, cores=(0, 1), env=env) as sender,
        apart(Member, manifest, bucket_bytes, 1, cores=(0, 1), env=env) as first,
        apart(Member, manifest, bucket_bytes, 2, cores=(0, 1), env=env) as second,
    ):
        members = (sender, first, second)
        for way in WAYS:
            _ask(members, Join(way, sender.ask(Join(way))))
        rates = await interleave({f"same_host_{way}": _side(members, way, manifest.num_bytes) for way in WAYS}, effort)
    return {
        f"same_host_{way}": Measurements(
            f"push to {NUM_RECEIVERS} receivers on one host, same_host={same_host}", UNIT, rates[f"same_host_{way}"]
        )
        for way, same_host in WAYS.items()
    }


def _ask(members: tuple[Peer, ...], job: Join | Push) -> list:
    for member in members:
        member.send(job)
    return [member.receive() for member in members]


def _side(members: tuple[Peer, ...], way: str, num_bytes: int) -> Side:
    async def run(round_number: int) -> float:
        moves = _ask(members, Push(way))
        return NUM_RECEIVERS * num_bytes / (max(m.ended_s for m in moves) - min(m.started_s for m in moves)) / 1e9

    return run
