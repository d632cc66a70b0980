"""A push of changed elements over one of whole tensors: bytes and seconds, after real steps of a pretrained model.

SmolLM2-135M takes policy-gradient steps with AdamW in float32 at two learning rates, and is pushed in bfloat16 after
each step. A receiver on another core applies the changes to its parameters, or copies whole tensors into them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

from benchmarks.harness.apart import Peer, apart
from benchmarks.harness.measure import Claim, Effort, Findings, Measurements, share
from benchmarks.harness.stage import scratch_config
from mobula.cluster.weight_sync.changes import Base, PushedChanges, VersionStep
from mobula.cluster.weight_sync.manifest import Manifest, TensorSpec
from mobula.cluster.weight_sync.transport import Rendezvous, TransferGroup
from mobula.configs.schema import RunConfig
from mobula.learner.policies.pretrained import write_smollm2
from mobula.learner.weight_publisher import WeightPublisher

RATES = (1e-6, 1e-5)
TARGETS = {1e-6: 0.05, 1e-5: 0.25}  # of the bytes
WAYS: dict[str, Literal["memory", "network"]] = {"memory": "memory", "gloo": "network"}
NUM_ROWS, NUM_TOKENS = 2, 64  # of a step
SENDER, RECEIVER = 0, 1
TIMEOUT_S = 120.0
DTYPE = "bfloat16"


@dataclass(frozen=True)
class Open:
    """Restores the model, and begins to train with `learning_rate`; the sender opens a transfer group for each way."""

    learning_rate: float
    epoch: int


@dataclass(frozen=True)
class Join:
    rendezvous: dict[str, Rendezvous]


@dataclass(frozen=True)
class Train:
    """Takes one step; the receiver does nothing."""


@dataclass(frozen=True)
class Push:
    way: str
    version: int
    base_version: int | None  # None: whole tensors, which also make the base of later changes
    is_whole: bool  # as payload `weights`


@dataclass(frozen=True)
class Compare:
    """Returns a number of the held tensors of each way, which is equal where all bits are."""


@dataclass(frozen=True)
class Pushed:
    """Start and end of a push, on the clock that both processes share, and the size of its changes."""

    started_s: float
    ended_s: float
    changes: PushedChanges | None


Job = Open | Join | Train | Push | Compare


class Member:
    """Rank 0 trains and sends; rank 1 receives as a sampler in torch does."""

    def __init__(self, folder: Path, bucket_bytes: int, rank: int) -> None:
        torch.set_num_threads(1)
        self._bucket_bytes, self._rank = bucket_bytes, rank
        model = LlamaForCausalLM.from_pretrained(folder)
        specs = [TensorSpec(name, tuple(tensor.shape), DTYPE) for name, tensor in model.named_parameters()]
        self._manifests = {True: Manifest(tuple(specs)), False: Manifest(tuple(specs), "delta")}
        if rank == SENDER:
            self._model = model
            self._initial = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}

    def __call__(self, job: Job) -> object:
        match job:
            case Open():
                return self._open(job)
            case Join():
                for way, rendezvous in job.rendezvous.items():
                    self._join(way, rendezvous)
            case Train() if self._rank == SENDER:
                self._train()
            case Push():
                return self._push(job)
            case Compare():
                return {way: self._sum(way) for way in WAYS}
        return None

    def _open(self, job: Open) -> dict[str, Rendezvous]:
        self._epoch = job.epoch
        if self._rank == RECEIVER:
            specs = self._manifests[True].tensors
            self._held = {
                way: Base({spec.name: torch.zeros(spec.shape, dtype=torch.bfloat16) for spec in specs}) for way in WAYS
            }
            self._groups: dict[str, TransferGroup] = {}
            return {}
        with torch.no_grad():
            for name, tensor in self._model.named_parameters():
                tensor.copy_(self._initial[name])
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=job.learning_rate, weight_decay=0.0)
        self._generator = torch.Generator().manual_seed(0)
        self._publishers = {way: self._publisher(same_host) for way, same_host in WAYS.items()}
        return {way: self._publishers[way].open_transfer(job.epoch, num_receivers=1) for way in WAYS}

    def _publisher(self, same_host: str) -> WeightPublisher:
        return WeightPublisher(
            self._manifests[False],
            lambda: ((name, tensor.detach()) for name, tensor in self._model.named_parameters()),
            rank=SENDER,
            device=torch.device("cpu"),
            transport="gloo",
            timeout_s=TIMEOUT_S,
            same_host=same_host,
        )

    def _join(self, way: str, rendezvous: Rendezvous) -> None:
        if self._rank == SENDER:
            self._publishers[way].join_transfer(rendezvous)
        else:
            self._groups[way] = TransferGroup(rendezvous, RECEIVER, torch.device("cpu"))

    def _train(self) -> None:
        """One policy-gradient step on tokens that the model samples, with random advantages."""
        tokens = self._sampled()  # [NUM_ROWS, NUM_TOKENS]
        advantages = torch.randn(NUM_ROWS, 1, generator=self._generator)
        logits = self._model(tokens).logits[:, :-1]
        losses = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        (losses.view(NUM_ROWS, -1) * advantages).mean().backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    @torch.no_grad()
    def _sampled(self) -> torch.Tensor:
        tokens = torch.randint(0, 40_000, (NUM_ROWS, 1), generator=self._generator)
        cache = None
        for _ in range(NUM_TOKENS - 1):
            output = self._model(tokens[:, -1:], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            drawn = torch.multinomial(output.logits[:, -1].softmax(-1), 1, generator=self._generator)
            tokens = torch.cat([tokens, drawn], dim=1)
        return tokens

    def _push(self, job: Push) -> Pushed:
        started, changes = time.perf_counter(), None
        if self._rank == SENDER:
            publisher = self._publishers[job.way]
            if job.is_whole:
                publisher.send(self._bucket_bytes, self._epoch)
            else:
                step = VersionStep(job.version, job.base_version, is_last=True)
                changes = publisher.send_changes(self._bucket_bytes, self._epoch, step)
        elif job.is_whole:
            tensors = self._held[job.way].tensors
            received = self._groups[job.way].receive(
                self._manifests[True], self._bucket_bytes, keeps=False, into=tensors
            )
            for name, tensor in received:
                tensors[name].copy_(tensor)
        else:
            manifest = replace(self._manifests[False], base_version=job.base_version)
            self._groups[job.way].receive_changes(manifest, self._bucket_bytes, self._held[job.way], job.version)
        return Pushed(started, time.perf_counter(), changes)

    def _sum(self, way: str) -> int:
        named = self._model.named_parameters() if self._rank == SENDER else self._held[way].tensors.items()
        return sum(
            int(t.detach().to(torch.bfloat16).view(torch.int16).long().sum()) * n for n, (_, t) in enumerate(named)
        )


def measure(effort: Effort, overrides: Sequence[str]) -> Findings:
    """Two processes on a core each."""
    with scratch_config((), overrides) as config:
        return asyncio.run(_measure(effort, config))


async def _measure(effort: Effort, config: RunConfig) -> Findings:
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    folder = write_smollm2(config.folder / "model")
    bucket_bytes = config.weight_sync.bucket_bytes
    series: dict[str, Measurements] = {}
    claims: list[Claim] = []
    with (
        apart(Member, folder, bucket_bytes, SENDER, cores=(0,), env=env) as sender,
        apart(Member, folder, bucket_bytes, RECEIVER, cores=(1,), env=env) as receiver,
    ):
        members = (sender, receiver)
        for epoch, rate in enumerate(RATES):
            found = _steps(members, Open(rate, epoch), effort)
            series |= _series(rate, found)
            claims += _claims(rate, found)
    settings = {"bucket_bytes": bucket_bytes, "threads": 1, "rows": NUM_ROWS, "tokens": NUM_TOKENS, "dtype": DTYPE}
    return Findings(settings, series, tuple(claims))


@dataclass(frozen=True)
class Steps:
    """One learning rate: a value for each step."""

    changed: tuple[float, ...]  # share of the elements
    sent: tuple[float, ...]  # bytes of the changes over those of whole tensors
    seconds: dict[str, tuple[float, ...]]  # "changes_memory", "whole_gloo", ...


def _steps(members: tuple[Peer, Peer], start: Open, effort: Effort) -> Steps:
    rendezvous = _ask(members, start)[SENDER]
    _ask(members, Join(rendezvous))
    sizes, seconds = (
        list[PushedChanges](),
        {f"{kind}_{way}": list[float]() for kind in ("changes", "whole") for way in WAYS},
    )
    whole = {way: _push(members, Push(way, 0, None, is_whole=False))[1] for way in WAYS}["memory"]
    for version in range(1, 1 + effort.warmups + effort.repeats):
        _ask(members, Train())
        for way in WAYS:
            took, changes = _push(members, Push(way, version, version - 1, is_whole=False))
            took_whole, _ = _push(members, Push(way, version, None, is_whole=True))
            if version > effort.warmups:
                seconds[f"changes_{way}"].append(took)
                seconds[f"whole_{way}"].append(took_whole)
                if way == "memory":
                    sizes.append(changes)
        ours, theirs = _ask(members, Compare())
        if ours != theirs:
            raise ValueError(f"version {version} did not arrive as it was sent")
    return Steps(
        tuple(size.num_changed / whole.num_changed for size in sizes),
        tuple(size.num_bytes / whole.num_bytes for size in sizes),
        {name: tuple(values) for name, values in seconds.items()},
    )


def _push(members: tuple[Peer, Peer], job: Push) -> tuple[float, PushedChanges]:
    ends = _ask(members, job)
    seconds = max(end.ended_s for end in ends) - min(end.started_s for end in ends)
    return seconds, ends[SENDER].changes


def _ask(members: tuple[Peer, Peer], job: Job) -> list:
    for member in members:
        member.send(job)
    return [member.receive() for member in members]


def _series(rate: float, found: Steps) -> dict[str, Measurements]:
    timed = {
        f"{name}_{rate:g}": Measurements(
            f"seconds of a push: {name.replace('_', ', ')}, learning rate {rate:g}", "s", values
        )
        for name, values in found.seconds.items()
    }
    return {
        f"changed_{rate:g}": Measurements(f"share of elements that a step changes at {rate:g}", "", found.changed),
        f"sent_{rate:g}": Measurements(f"bytes of the changes over whole tensors at {rate:g}", "", found.sent),
        **timed,
    }


def _claims(rate: float, found: Steps) -> list[Claim]:
    claims = [
        Claim(f"bytes of changes / of whole tensors, {rate:g}", median(found.sent), TARGETS[rate], at_least=False)
    ]
    for way in WAYS:
        ratio = share(found.seconds[f"changes_{way}"], found.seconds[f"whole_{way}"])
        claims.append(Claim(f"seconds of changes / of whole tensors, {way}, {rate:g}", ratio, at_least=False))
    return claims
