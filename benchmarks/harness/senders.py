"""A push of sharded weights by one learner rank, and by two that send at the same time.

Two ranks hold a shard of each tensor, gather them as FSDP2's backend does, and send; one receiver copies the tensors
into its parameters. Each is a separate process.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from benchmarks.harness.apart import Peer, apart
from benchmarks.harness.measure import Effort, Measurements, Side, interleave
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.cluster.weight_sync.transport import Rendezvous, TransferGroup
from mobula.configs.schema import RunConfig
from mobula.learner.backends.sharded import gather_whole
from mobula.learner.weight_publisher import WeightPublisher

NUM_RANKS = 2
RECEIVER = 1  # its rank in a transfer group
TIMEOUT_S = 60.0
UNIT = "GB/s"


@dataclass(frozen=True)
class Open:
    """Rank 0 listens for a transfer group of `num_senders`."""

    num_senders: int


@dataclass(frozen=True)
class Join:
    rendezvous: Rendezvous


@dataclass(frozen=True)
class Push:
    num_senders: int


@dataclass(frozen=True)
class Moved:
    """On the clock that all processes share."""

    started_s: float
    ended_s: float


class LearnerRank:
    """Rank `rank` of the learner; tensor `i` is filled with `i`."""

    def __init__(self, address: str, manifest: Manifest, bucket_bytes: int, transport: str, rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=NUM_RANKS)
        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        self._bucket_bytes = bucket_bytes
        self._shards = {
            spec.name: distribute_tensor(torch.full(spec.shape, float(index)), mesh, [Shard(0)])
            for index, spec in enumerate(manifest.tensors)
        }
        self._publishers = {
            num_senders: WeightPublisher(
                manifest,
                self._gathered,
                rank=rank,
                device=torch.device("cpu"),
                transport=transport,
                timeout_s=TIMEOUT_S,
                num_ranks=NUM_RANKS,
                num_senders=num_senders,
                same_host="network",
            )
            for num_senders in (1, 2)
        }

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        shards: dict[str, DTensor] = self._shards
        return gather_whole(shards)

    def __call__(self, job: Open | Join | Push) -> Rendezvous | Moved | None:
        match job:
            case Open():
                return self._publishers[job.num_senders].open_transfer(job.num_senders, num_receivers=1)
            case Join():
                self._publishers[job.rendezvous.num_senders].join_transfer(job.rendezvous)
                return None
            case Push():
                started = time.perf_counter()
                self._publishers[job.num_senders].send(self._bucket_bytes, job.num_senders)
                return Moved(started, time.perf_counter())


class Receiver:
    """One engine, which copies the tensors into its parameters."""

    def __init__(self, manifest: Manifest, bucket_bytes: int) -> None:
        torch.set_num_threads(1)
        self._manifest = manifest
        self._bucket_bytes = bucket_bytes
        self._held = {spec.name: torch.zeros(spec.shape) for spec in manifest.tensors}
        self._groups: dict[int, TransferGroup] = {}

    def __call__(self, job: Join | Push) -> Moved | None:
        if isinstance(job, Join):
            self._groups[job.rendezvous.num_senders] = TransferGroup(job.rendezvous, RECEIVER, torch.device("cpu"))
            return None
        started = time.perf_counter()
        group = self._groups[job.num_senders]
        for name, tensor in group.receive(self._manifest, self._bucket_bytes, keeps=False, into=self._held):
            self._held[name].copy_(tensor)
        wrong = [n for i, (n, t) in enumerate(self._held.items()) if t.view(-1)[-1] != i or t.view(-1)[0] != i]
        if wrong:
            raise ValueError(f"{wrong[0]} did not arrive as it was sent")
        return Moved(started, time.perf_counter())


async def measure_senders(effort: Effort, config: RunConfig, manifest: Manifest) -> dict[str, Measurements]:
    """GB/s of a push by one and by two senders, as "senders_1" and "senders_2"."""
    address = f"file://{config.folder / 'learner'}"
    bucket_bytes, transport = config.weight_sync.bucket_bytes, config.resources.transport
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with (
        apart(LearnerRank, address, manifest, bucket_bytes, transport, 0, cores=(0,), env=env) as first,
        apart(LearnerRank, address, manifest, bucket_bytes, transport, 1, cores=(1,), env=env) as second,
        apart(Receiver, manifest, bucket_bytes, cores=(0, 1), env=env) as receiver,
    ):
        members = (first, second, receiver)
        for num_senders in (1, 2):
            rendezvous = first.ask(Open(num_senders))
            _ask(members, Join(rendezvous))
        sides = {f"senders_{n}": _side(members, n, manifest.num_bytes) for n in (1, 2)}
        found = await interleave(sides, effort)
    words = {1: "rank 0 of 2 sends", 2: "both ranks send"}
    return {
        f"senders_{n}": Measurements(f"push of sharded weights, {text}", UNIT, found[f"senders_{n}"])
        for n, text in words.items()
    }


def _ask(members: tuple[Peer, ...], job: Join | Push) -> list:
    for member in members:
        member.send(job)
    return [member.receive() for member in members]


def _side(members: tuple[Peer, ...], num_senders: int, num_bytes: int) -> Side:
    async def run(round_number: int) -> float:
        moves = _ask(members, Push(num_senders))
        return num_bytes / (max(m.ended_s for m in moves) - min(m.started_s for m in moves)) / 1e9

    return run
