"""A push to several receivers: bytes/s delivered beside a raw broadcast to as many, all at once and one after another.

Every member is a process of its own. A receiver holds what a sampler holds; of a push of adapters it merges each into
its weight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.harness.apart import Peer, apart
from benchmarks.harness.measure import Effort, Measurements, interleave
from mobula.cluster.weight_sync.manifest import Manifest, TensorSpec
from mobula.cluster.weight_sync.transport import Rendezvous, TransferGroup
from mobula.configs.schema import RunConfig
from mobula.learner.policies.adapters import A, B, merged
from mobula.learner.weight_publisher import WeightPublisher

SENDER = 0
NUM_RECEIVERS = (1, 2, 4)
RANK = 8  # of the adapters
SCALE = 2.0
TIMEOUT_S = 60.0
UNIT = "GB/s"


@dataclass(frozen=True)
class Join:
    """Take part in one wave; `member` is this process's rank in it."""

    rendezvous: Rendezvous
    member: int
    is_adapters: bool


@dataclass(frozen=True)
class Open:
    """The sender listens for one wave."""

    epoch: int
    num_receivers: int
    is_adapters: bool


@dataclass(frozen=True)
class Move:
    """Deliver all once to `num_receivers`: as one raw broadcast (no epochs), or by a push to each epoch's wave."""

    num_receivers: int
    epochs: tuple[int, ...]
    is_adapters: bool


@dataclass(frozen=True)
class Compare:
    """A receiver says whether it holds what the last push of weights, then of adapters, makes of its tensors."""


@dataclass(frozen=True)
class Moved:
    """On the clock that all processes share."""

    started_s: float
    ended_s: float


Job = Open | Join | Move | Compare


def adapters_of(manifest: Manifest) -> Manifest:
    """One adapter a matrix."""
    matrices = [spec for spec in manifest.tensors if len(spec.shape) == 2]
    return Manifest(
        tuple(
            factor
            for spec in matrices
            for factor in (
                TensorSpec(f"{spec.name}.{A}", (RANK, spec.shape[1]), spec.dtype),
                TensorSpec(f"{spec.name}.{B}", (spec.shape[0], RANK), spec.dtype),
            )
        )
    )


class Member:
    """One process: the sender, or a receiver."""

    def __init__(self, address: str, config: RunConfig, manifest: Manifest, rank: int) -> None:
        self._rank = rank
        self._bucket_bytes = config.weight_sync.bucket_bytes
        self._device = torch.device("cpu")
        world_size = 1 + max(NUM_RECEIVERS)
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
        self._raw_groups = {n: dist.new_group(list(range(n + 1))) for n in NUM_RECEIVERS}
        self._manifests = {False: manifest, True: adapters_of(manifest)}
        self._sent = {kind: self._filled(m, kind) for kind, m in self._manifests.items()}
        self._base = {name: torch.ones_like(tensor) for name, tensor in self._sent[False].items()}
        self._held = {name: torch.zeros_like(tensor) for name, tensor in self._sent[False].items()}
        self._raw = {kind: torch.zeros(m.num_bytes, dtype=torch.uint8) for kind, m in self._manifests.items()}
        self._publishers = {kind: self._publisher(kind) for kind in self._manifests} if rank == SENDER else {}
        self._groups: dict[int, TransferGroup] = {}

    def __call__(self, job: Job) -> Rendezvous | Moved | bool | None:
        match job:
            case Open():
                return self._publishers[job.is_adapters].open_transfer(job.epoch, job.num_receivers)
            case Join():
                return self._join(job)
            case Move():
                return self._timed(job)
            case Compare():
                return self._is_right()

    def _join(self, job: Join) -> None:
        if self._rank == SENDER:
            self._publishers[job.is_adapters].join_transfer(job.rendezvous)
        else:
            self._groups[job.rendezvous.epoch] = TransferGroup(job.rendezvous, job.member, self._device)

    def _timed(self, job: Move) -> Moved:
        group = self._raw_groups[job.num_receivers]
        dist.barrier(group)
        started = time.perf_counter()
        if job.epochs:
            self._push(job)
        else:
            dist.broadcast(self._raw[job.is_adapters], src=SENDER, group=group)
        return Moved(started, time.perf_counter())

    def _push(self, job: Move) -> None:
        for epoch in job.epochs:
            if self._rank == SENDER:
                self._publishers[job.is_adapters].send(self._bucket_bytes, epoch)
            elif epoch in self._groups:
                self._receive(self._groups[epoch], job.is_adapters)

    def _receive(self, group: TransferGroup, is_adapters: bool) -> None:
        into = {} if is_adapters else self._held
        received = group.receive(self._manifests[is_adapters], self._bucket_bytes, keeps=is_adapters, into=into)
        if not is_adapters:
            for name, tensor in received:
                self._held[name].copy_(tensor)
            return
        factors = dict(received)
        for name in self._matrices():
            self._held[name].copy_(merged(self._base[name], factors[f"{name}.{A}"], factors[f"{name}.{B}"], SCALE))

    def _is_right(self) -> bool:
        """Matrices come from the push of adapters, which is the last one, vectors from that of weights."""
        matrices, sent = set(self._matrices()), self._sent
        expected = {
            name: self._base[name] + SCALE * sent[True][f"{name}.{B}"] @ sent[True][f"{name}.{A}"]
            if name in matrices
            else tensor
            for name, tensor in sent[False].items()
        }
        return all(torch.allclose(self._held[name], tensor) for name, tensor in expected.items())

    def _matrices(self) -> list[str]:
        return [spec.name for spec in self._manifests[False].tensors if len(spec.shape) == 2]

    def _filled(self, manifest: Manifest, is_adapters: bool) -> dict[str, torch.Tensor]:
        """The same numbers in every process."""
        generator = torch.Generator().manual_seed(int(is_adapters))
        return {spec.name: torch.randn(spec.shape, generator=generator) for spec in manifest.tensors}

    def _publisher(self, is_adapters: bool) -> WeightPublisher:
        return WeightPublisher(
            self._manifests[is_adapters],
            lambda: iter(self._sent[is_adapters].items()),
            rank=SENDER,
            device=self._device,
            transport="gloo",
            timeout_s=TIMEOUT_S,
            same_host="network",
        )


async def fan_out(effort: Effort, config: RunConfig, manifest: Manifest) -> dict[str, Measurements]:
    """GB/s delivered to all receivers together: series "raw_to_4", "at_once_to_4", "rolling_to_4", "adapters_to_4"."""
    address = f"file://{config.folder / 'fan-out'}"
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with ExitStack() as stack:
        members = [
            stack.enter_context(apart(Member, address, config, manifest, rank, cores=(rank % 2,), env=env))
            for rank in range(1 + max(NUM_RECEIVERS))
        ]
        moves = _moves(members)
        sizes = {False: manifest.num_bytes, True: adapters_of(manifest).num_bytes}
        sides = {name: _side(members, move, sizes[move.is_adapters]) for name, move in moves.items()}
        found = await interleave(sides, effort)
        _ask(members, moves[f"at_once_to_{max(NUM_RECEIVERS)}"])
        _ask(members, moves[f"adapters_to_{max(NUM_RECEIVERS)}"])
        if not all(member.ask(Compare()) for member in members[1:]):
            raise ValueError("a push did not arrive as it was sent")
    return {name: Measurements(_described(name, moves[name], sizes), UNIT, values) for name, values in found.items()}


def _moves(members: Sequence[Peer]) -> dict[str, Move]:
    """Every way to deliver, to every number of receivers, its transfer groups open."""
    moves, epoch = {}, 0
    for n in NUM_RECEIVERS:
        ways = {"at_once": ([range(1, n + 1)], False), "adapters": ([range(1, n + 1)], True)}
        if n > 1:
            one_by_one = [range(rank, rank + 1) for rank in range(1, n + 1)]
            ways |= {"rolling": (one_by_one, False), "adapters_rolling": (one_by_one, True)}
        moves |= {f"raw_to_{n}": Move(n, (), False), f"adapters_raw_to_{n}": Move(n, (), True)}
        for name, (waves, is_adapters) in ways.items():
            epochs = tuple(range(epoch + 1, epoch + 1 + len(waves)))
            for number, wave in zip(epochs, waves, strict=True):
                _open(members, number, wave, is_adapters)
            epoch = epochs[-1]
            moves[f"{name}_to_{n}"] = Move(n, epochs, is_adapters)
    return moves


def _open(members: Sequence[Peer], epoch: int, wave: range, is_adapters: bool) -> None:
    rendezvous = members[SENDER].ask(Open(epoch, len(wave), is_adapters))
    joining = [members[SENDER], *(members[rank] for rank in wave)]
    for number, member in enumerate(joining):
        member.send(Join(rendezvous, number, is_adapters))
    for member in joining:
        member.receive()


def _ask(members: Sequence[Peer], job: Move) -> list[Moved]:
    taking_part = members[: 1 + job.num_receivers]
    for member in taking_part:
        member.send(job)
    return [member.receive() for member in taking_part]


def _side(members: Sequence[Peer], job: Move, num_bytes: int) -> Callable:
    async def run(round_number: int) -> float:
        moves = _ask(members, job)
        seconds = max(m.ended_s for m in moves) - min(m.started_s for m in moves)
        return job.num_receivers * num_bytes / seconds / 1e9

    return run


def _described(name: str, move: Move, sizes: dict[bool, int]) -> str:
    payload = f"{sizes[move.is_adapters]} bytes of {'adapters' if move.is_adapters else 'weights'}"
    way = {0: "raw broadcast", 1: "push all at once"}.get(len(move.epochs), "pushes one after another")
    merging = ", merged at the receiver" if move.is_adapters and move.epochs else ""
    return f"{payload} to {move.num_receivers}: {way}{merging}"
