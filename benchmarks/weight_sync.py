"""Weight sync: bytes/s of a push over those of a raw broadcast of the same bytes between the same processes, and over
those of a push without digests; pushes to several receivers and of adapters, and the delay of a running generation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import prod
from typing import Literal
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.harness.apart import Peer, apart
from benchmarks.harness.fan_out import NUM_RECEIVERS, adapters_of, fan_out
from benchmarks.harness.measure import Claim, Effort, Findings, Measurements, interleave, rates, share
from benchmarks.harness.push_pause import into_engine
from benchmarks.harness.same_host import measure_same_host
from benchmarks.harness.senders import measure_senders
from benchmarks.harness.stage import private_ray, scratch_config
from mobula.cluster.weight_sync.manifest import Manifest, TensorSpec
from mobula.cluster.weight_sync.transport import Rendezvous, TransferGroup
from mobula.configs.schema import RunConfig
from mobula.learner.weight_publisher import WeightPublisher

SETTINGS = ("resources.rollout.num_workers=1", "policy.lora.rank=8", "sampler.max_model_len=768")
MIB = 2**20
SIZES = {256: 1, 64: 4, 1: 64}  # MiB of one push -> pushes within one measurement
CLAIMED = 256
TARGET = 0.5
SENDERS_TARGET = 0.95  # three processes here share two cores; with a core each it is 1.3 or more
SAME_HOST_TARGET = 1.5  # three processes here share two cores; the aim with a core each is 2
TIMEOUT_S = 60.0
SENDER, RECEIVER = 0, 1
FAN_OUT = 64  # MiB of weights in a push to several receivers
UNIT = "GB/s"
NO_DIGEST = torch.zeros((), dtype=torch.int64)


def measure(effort: Effort, overrides: Sequence[str]) -> Findings:
    """Two processes on a core each; then, as information, a push of the run's model into a vLLM engine."""
    with scratch_config(SETTINGS, overrides) as config:
        found = asyncio.run(_between_processes(effort, config))
        delivered = asyncio.run(fan_out(effort, config, transformer_manifest(FAN_OUT * MIB)))
        delivered |= asyncio.run(measure_senders(effort, config, transformer_manifest(CLAIMED * MIB)))
        delivered |= asyncio.run(measure_same_host(effort, config, transformer_manifest(CLAIMED * MIB)))
        with private_ray(config):
            pushed = asyncio.run(into_engine(effort, config))
    return _findings(config, found, delivered, pushed)


@dataclass(frozen=True)
class Meeting:
    """The address at which the two processes join their raw process group, and their device."""

    address: str
    device: str
    transport: str
    bucket_bytes: int


@dataclass(frozen=True)
class Open:
    """Allocate `manifest`'s tensors; the sender names the rendezvous of a transfer group for them."""

    manifest: Manifest
    epoch: int


@dataclass(frozen=True)
class Join:
    rendezvous: Rendezvous


@dataclass(frozen=True)
class Push:
    """Move all tensors `num_times`: as our push, the same with digests that are not computed but 0 on both sides, or
    raw as one broadcast of as many bytes."""

    kind: Literal["push", "undigested", "raw"]
    num_times: int


@dataclass(frozen=True)
class Compare:
    """The receiver says whether it holds what the sender was filled with."""


@dataclass(frozen=True)
class Moved:
    """When it began and ended, on the clock that both processes share."""

    started_s: float
    ended_s: float


Job = Open | Join | Push | Compare


class Member:
    """One end of the wire: rank 0 sends, rank 1 receives as a sampler does, into parameters that it holds."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self._rank = rank
        index = f":{rank % torch.cuda.device_count()}" if meeting.device == "cuda" else ""
        self._device = torch.device(meeting.device + index)
        dist.init_process_group(meeting.transport, init_method=meeting.address, rank=rank, world_size=2)

    def __call__(self, job: Job) -> Rendezvous | Moved | bool | None:
        match job:
            case Open():
                return self._open(job)
            case Join():
                return self._join(job.rendezvous)
            case Push():
                moves = {"push": self._push, "undigested": self._push_undigested, "raw": self._broadcast}
                return self._timed(moves[job.kind], job.num_times)
            case Compare():
                return all(torch.equal(tensor, filled(i, tensor)) for i, tensor in enumerate(self._tensors.values()))

    def _open(self, job: Open) -> Rendezvous | None:
        self._manifest = job.manifest
        self._raw = torch.zeros(job.manifest.num_bytes, dtype=torch.uint8, device=self._device)
        self._tensors = {spec.name: torch.zeros(spec.shape, device=self._device) for spec in job.manifest.tensors}
        if self._rank == RECEIVER:
            return None
        for i, tensor in enumerate(self._tensors.values()):
            tensor.copy_(filled(i, tensor))
        self._publisher = WeightPublisher(
            job.manifest,
            lambda: iter(self._tensors.items()),
            rank=SENDER,
            device=self._device,
            transport=self._meeting.transport,
            timeout_s=TIMEOUT_S,
            same_host="network",
        )
        self._epoch = job.epoch
        return self._publisher.open_transfer(job.epoch, num_receivers=1)

    def _join(self, rendezvous: Rendezvous) -> None:
        if self._rank == SENDER:
            self._publisher.join_transfer(rendezvous)
        else:
            self._group = TransferGroup(rendezvous, RECEIVER, self._device)

    def _timed(self, move: Callable[[], None], num_times: int) -> Moved:
        dist.barrier()
        started = time.perf_counter()
        for _ in range(num_times):
            move()
        self._synchronize()
        return Moved(started, time.perf_counter())

    def _broadcast(self) -> None:
        dist.broadcast(self._raw, src=SENDER)

    def _push(self) -> None:
        if self._rank == SENDER:
            self._publisher.send(self._meeting.bucket_bytes, self._epoch)
        else:
            self._receive()

    def _push_undigested(self) -> None:
        modules = ("mobula.cluster.weight_sync.transport", "mobula.learner.weight_publisher")
        with patch(f"{modules[0]}.digest", _no_digest), patch(f"{modules[1]}.digest", _no_digest):
            self._push()

    def _receive(self) -> None:
        for name, tensor in self._group.receive(
            self._manifest, self._meeting.bucket_bytes, keeps=False, into=self._tensors
        ):
            self._tensors[name].copy_(tensor)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _no_digest(data: torch.Tensor) -> torch.Tensor:
    return NO_DIGEST.to(data.device)


def filled(index: int, like: torch.Tensor) -> torch.Tensor:
    """Numbers that differ from tensor to tensor and from place to place."""
    return torch.arange(like.numel(), device=like.device, dtype=torch.float32).add_(index).view(like.shape)


def transformer_manifest(num_bytes: int) -> Manifest:
    """float32 tensors of exactly `num_bytes`, with the sizes of a transformer's blocks, large and small."""
    hidden = 1024 if num_bytes >= 64 * MIB else 128
    block = ((hidden, hidden), (hidden,), (hidden // 4, hidden), (hidden // 4,), (hidden * 8 // 3, hidden), (hidden,))
    return Manifest(tuple(_fitting(cycle(block), num_bytes // 4)))


def _fitting(shapes: Iterator[tuple[int, ...]], num_left: int) -> Iterator[TensorSpec]:
    index = 0
    while num_left > 0:
        shape = next(shapes)
        shape = shape if prod(shape) <= num_left else (num_left,)
        yield TensorSpec(f"blocks.{index}.weight", shape, "float32")
        num_left -= prod(shape)
        index += 1


async def _between_processes(effort: Effort, config: RunConfig) -> dict[str, tuple[float, ...]]:
    """Series name -> GB/s, e.g. "push_256" and "raw_256"."""
    resources = config.resources
    address = f"file://{config.folder / 'rendezvous'}"
    meeting = Meeting(address, resources.device, resources.transport, config.weight_sync.bucket_bytes)
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    found: dict[str, tuple[float, ...]] = {}
    with (
        apart(Member, meeting, SENDER, cores=(0,), env=env) as sender,
        apart(Member, meeting, RECEIVER, cores=(1,), env=env) as receiver,
    ):
        for epoch, (size, num_times) in enumerate(SIZES.items()):
            _connect((sender, receiver), transformer_manifest(size * MIB), epoch)
            sides = {
                f"{kind}_{size}": _side((sender, receiver), Push(kind, num_times), size * MIB)
                for kind in ("push", "undigested", "raw")
            }
            found |= await interleave(sides, effort)
            if not receiver.ask(Compare()):
                raise ValueError(f"the push of {size} MiB did not arrive as it was sent")
    return found


def _connect(members: tuple[Peer, Peer], manifest: Manifest, epoch: int) -> None:
    [rendezvous, _] = _ask_both(members, Open(manifest, epoch))
    _ask_both(members, Join(rendezvous))


def _ask_both(members: tuple[Peer, Peer], job: Job) -> list:
    for member in members:
        member.send(job)
    return [member.receive() for member in members]


def _side(members: tuple[Peer, Peer], job: Push, num_bytes: int) -> Callable:
    async def run(round_number: int) -> float:
        moves = _ask_both(members, job)
        seconds = max(m.ended_s for m in moves) - min(m.started_s for m in moves)
        return job.num_times * num_bytes / seconds / 1e9

    return run


def _findings(
    config: RunConfig,
    found: dict[str, tuple[float, ...]],
    delivered: dict[str, Measurements],
    pushed: dict[str, Measurements],
) -> Findings:
    transport = config.resources.transport
    what = {
        "push": "pack, broadcast bucket by bucket, unpack and copy into the receiver's parameters",
        "undigested": "the same push, digests of its buckets left out on both sides",
        "raw": f"dist.broadcast over {transport} of one tensor of as many bytes",
    }
    series = {
        f"{side}_{size}": Measurements(f"{what[side]} ({size} MiB)", UNIT, found[f"{side}_{size}"])
        for size in SIZES
        for side in what
    }
    series |= delivered | pushed
    claims = tuple(
        Claim(f"push / raw broadcast, {size} MiB", rates(series[f"push_{size}"], series[f"raw_{size}"]), target)
        for size, target in ((size, TARGET if size == CLAIMED else None) for size in SIZES)
    )
    claims += tuple(
        Claim(f"push / the same without digests, {size} MiB", share(found[f"push_{size}"], found[f"undigested_{size}"]))
        for size in SIZES
    )
    claims += _fan_out_claims(series)
    ratio = rates(series["senders_2"], series["senders_1"])
    claims += (Claim(f"push by two learner ranks / by one, {CLAIMED} MiB", ratio, SENDERS_TARGET),)
    ratio = rates(series["same_host_memory"], series["same_host_gloo"])
    claims += (Claim(f"push to two receivers on one host, memory / gloo, {CLAIMED} MiB", ratio, SAME_HOST_TARGET),)
    claims += tuple(
        Claim(f"pause of a running generation / push, {kind}", series[f"pause_{kind}"].median / series[name].median)
        for kind, name in (("weights", "engine_reload"), ("adapters", "engine_adapters"))
    )
    settings = {
        "transport": transport,
        "bucket_bytes": config.weight_sync.bucket_bytes,
        "threads": 1,
        "pushes_in_one_measurement": {str(size): n for size, n in SIZES.items()},
        "fan_out_mib": FAN_OUT,
        "tensors": {str(size): len(transformer_manifest(size * MIB).tensors) for size in SIZES},
    }
    return Findings(settings, series, claims)


def _fan_out_claims(series: dict[str, Measurements]) -> tuple[Claim, ...]:
    """Bytes delivered in a second over those of a raw broadcast to as many receivers, and what adapters save."""
    manifest = transformer_manifest(FAN_OUT * MIB)
    saved = manifest.num_bytes / adapters_of(manifest).num_bytes
    claims = []
    for n in NUM_RECEIVERS:
        ways = {"at_once": "all at once", "rolling": "one after another"}
        for way, words in ((way, words) for way, words in ways.items() if f"{way}_to_{n}" in series):
            ratio = rates(series[f"{way}_to_{n}"], series[f"raw_to_{n}"])
            claims.append(Claim(f"push to {n} {words} / raw broadcast to {n}, {FAN_OUT} MiB", ratio))
        ratio = saved * rates(series[f"adapters_to_{n}"], series[f"at_once_to_{n}"])
        claims.append(Claim(f"pushes of adapters in a second / pushes of weights, to {n} at once", ratio))
    return tuple(claims)
