"""The roles that hold weights, as small as can be: they compute next to nothing but die, hang, push and meet for real.

The policy is one number: what a sum over the ids of all trained groups makes of it. So two runs that trained the same
groups in the same order have the same weights, and an engine that got another version's bytes is found out.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fakes import make_group
from sabotage import Saboteur
from small_workers import OBJECT_S

from mobula.actors.rollout.server import PromptServer
from mobula.cluster.records.partial_response import Attempt
from mobula.cluster.records.trajectory import GroupReport, Prompt, Response, ScoredGroup, TrajectoryGroup
from mobula.cluster.roles import SamplingSettings, UpdateReport
from mobula.cluster.runtime.object_store import fetch, fetch_or_miss
from mobula.cluster.weight_sync.changes import VersionStep
from mobula.cluster.weight_sync.manifest import Manifest, TensorSpec
from mobula.cluster.weight_sync.transport import Rendezvous, TransferGroup, unpack_all
from mobula.learner.backends.sharded import RankRendezvous
from mobula.learner.weight_publisher import WeightPublisher

# Of 4 MiB each, so that each is a bucket and both ranks send.
MANIFEST = Manifest((TensorSpec("w", (1 << 20,), "float32"), TensorSpec("v", (1 << 20,), "float32")))
PRIME = 1_000_003  # keeps the policy a whole number that float32 holds exactly
TRANSFER_S = 5.0


class SmallRollout(PromptServer):
    """An engine that samples three tokens, one every `token_s`, and really takes part in broadcasts.

    Each answer has `answer_bytes`; an object of more than 100 KB lives on the node that made it.
    """

    def __init__(self, name: str, folder: Path, token_s: float, answer_bytes: int) -> None:
        super().__init__()
        self._saboteur = Saboteur(folder)
        self._saboteur.enlist(name)
        self._token_s = token_s
        self._answer_bytes = answer_bytes
        self._weight = float("nan")
        self._version = -1

    async def start(self) -> None: ...

    async def ping(self) -> int:
        return self._version

    async def probe(self) -> None: ...

    async def generate(
        self, prompt: Prompt, settings: SamplingSettings, attempt: Attempt
    ) -> tuple[TrajectoryGroup, GroupReport]:
        versions = []
        while self._version < settings.min_version:
            await asyncio.sleep(0.002)
        for _ in range(3):
            await asyncio.sleep(self._token_s)
            versions.append(self._version)
        self._saboteur.moment("generating")
        group = self._with_answers(make_group(prompt, versions))
        if self._saboteur.moment("replying"):
            await self._lose_the_reply()
        return group, (group.summary(), group.small_responses())

    async def _lose_the_reply(self) -> None:
        """Wait until the caller gives up and breaks the call off."""
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self._saboteur.moment("broken_off")
            raise

    def _with_answers(self, group: TrajectoryGroup) -> TrajectoryGroup:
        response = Response("x" * self._answer_bytes, 3, is_truncated=False)
        return TrajectoryGroup(group.prompt, tuple(replace(t, response=response) for t in group.trajectories))

    async def prompt_logprobs(self, prompt: Prompt) -> np.ndarray:
        return np.full(3, -self._weight)

    async def check_manifest(self, manifest: Manifest) -> None:
        manifest.check_against(MANIFEST)

    async def join_transfer(self, rendezvous: Rendezvous, rank: int) -> None:
        self._group = await asyncio.to_thread(TransferGroup, rendezvous, rank, torch.device("cpu"))

    async def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> int:
        await asyncio.to_thread(self._receive, manifest, bucket_bytes)
        self._version = version
        return version

    async def load_weights(self, manifest: Manifest, bucket_bytes: int, buckets: Sequence[Any], version: int) -> None:
        packed = await asyncio.to_thread(fetch, buckets, timeout_s=60, what="the buckets")
        self._take(unpack_all(manifest, bucket_bytes, packed))
        self._version = version

    async def close(self) -> None: ...

    def _receive(self, manifest: Manifest, bucket_bytes: int) -> None:
        self._saboteur.moment("in_broadcast")
        self._take(self._group.receive(manifest, bucket_bytes, keeps=True))

    def _take(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        numbers = {float(tensor[-1]) for _, tensor in tensors}
        assert len(numbers) == 1, f"the tensors are of several versions: {numbers}"
        self._weight = numbers.pop()


class SmallLearner:
    """One of two ranks that meet over gloo in every update."""

    def __init__(self, name: str, folder: Path, rank: int, world_size: int) -> None:
        self._saboteur = Saboteur(folder)
        self._saboteur.enlist(name)
        self._rank, self._world_size = rank, world_size
        self._rendezvous = RankRendezvous()
        self._state: dict[str, Any] = {"version": 0, "weight": 0, "trained": []}

    def rendezvous_address(self) -> str:
        return self._rendezvous.address(TRANSFER_S)

    def connect(self, address: str) -> None:
        self._rendezvous.join(
            address, rank=self._rank, world_size=self._world_size, backend="gloo", timeout_s=TRANSFER_S
        )
        self._publisher = WeightPublisher(
            MANIFEST,
            lambda: iter([(s.name, torch.full(s.shape, float(self._state["weight"]))) for s in MANIFEST.tensors]),
            rank=self._rank,
            device=torch.device("cpu"),
            transport="gloo",
            timeout_s=TRANSFER_S,
            num_ranks=self._world_size,
            num_senders=self._world_size,
        )

    def update(self, groups: Sequence[ScoredGroup], version: int) -> UpdateReport:
        if self._rank == 0:
            self._saboteur.moment("in_update")
        dist.all_reduce(torch.ones(1))
        ids = [group.summary.group_id for group in groups]
        found = fetch_or_miss([group.group for group in groups], timeout_s=OBJECT_S, what="groups")
        assert ids == [group.group_id for group in found]
        logprobs = fetch_or_miss([group.reference_logprobs for group in groups], timeout_s=OBJECT_S, what="log-probs")
        assert [len(of_group) for of_group in logprobs] == [len(group.trajectories) for group in found]
        for group_id in ids:
            digest = int.from_bytes(hashlib.sha256(group_id.encode()).digest()[:4], "big")
            self._state["weight"] = (self._state["weight"] * 31 + digest) % PRIME
        self._state["trained"] += [ids]
        self._state["version"] = version
        return UpdateReport(version, {"loss": 0.0})

    def sequence_logprobs(self, prompt: Prompt, num_copies: int = 1) -> np.ndarray:
        return np.full(3, -float(self._state["weight"]))

    def manifest(self) -> Manifest:
        return MANIFEST

    def open_transfer(self, epoch: int, num_receivers: int) -> Rendezvous:
        return self._publisher.open_transfer(epoch, num_receivers)

    def join_transfer(self, rendezvous: Rendezvous) -> None:
        self._publisher.join_transfer(rendezvous)

    def leave_transfer(self, epoch: int) -> None:
        self._publisher.leave_transfer(epoch)

    def send_weights(self, bucket_bytes: int, epoch: int, step: VersionStep | None = None) -> None:
        if self._rank == 0:
            self._saboteur.moment("sending")
        self._publisher.send(bucket_bytes, epoch)

    def export_buckets(self, bucket_bytes: int) -> tuple[int | np.ndarray, ...]:
        return self._state["version"], *self._publisher.export(bucket_bytes)

    def save(self, folder: Path) -> None:
        if self._rank == 0:
            self._saboteur.moment("in_checkpoint")
        torch.save(self._state, folder / f"rank{self._rank}.pt")

    def finish_save(self) -> None: ...

    def load(self, folder: Path) -> int:
        self._state = torch.load(folder / f"rank{self._rank}.pt")
        return self._state["version"]

    def close(self) -> None:
        self._publisher.close()
        dist.destroy_process_group()
