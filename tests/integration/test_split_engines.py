"""Two engines of two ranks each, every rank a process of its own: one push of `WeightSync` over gloo reaches them all.

A rank runs the engine's side as vLLM's worker does: `MobulaWeightTransferEngine` with its own place in the engine. vLLM
itself does not run.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import FixedMembers

from mobula.actors.samplers.vllm.weights import JoinInfo, MobulaWeightTransferEngine
from mobula.cluster.weight_sync.changes import VersionStep
from mobula.cluster.weight_sync.manifest import Manifest, TensorSpec
from mobula.cluster.weight_sync.tolerance import Tolerance
from mobula.cluster.weight_sync.transport import Rendezvous
from mobula.cluster.weight_sync.weight_sync import WeightSync
from mobula.learner.weight_publisher import WeightPublisher

RANKS, ENGINES, TIMEOUT_S, BUCKET_BYTES = 2, 2, 60.0, 4096
MANIFEST = Manifest(
    (
        TensorSpec("embed", (300, 8), "float32"),
        TensorSpec("norm", (8,), "bfloat16"),
        TensorSpec("head", (16, 8), "float32"),
    )
)


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {s.name: torch.randn(s.shape, generator=generator).to(getattr(torch, s.dtype)) for s in MANIFEST.tensors}


def rank_process(own_rank: int, calls: Connection) -> None:
    """One rank of an engine: joins and receives when it is called."""
    engine = MobulaWeightTransferEngine.__new__(MobulaWeightTransferEngine)
    engine.device, engine.parallel_config = "cpu", SimpleNamespace(rank=own_rank)
    while (call := calls.recv()) is not None:
        method, argument = call
        if method == "join":
            engine.init_transfer_engine(JoinInfo(**argument))
            calls.send(engine._group.rank)
        else:
            received = engine.receive(Manifest.from_wire(argument), BUCKET_BYTES, version=0)
            calls.send({name: tensor.clone() for name, tensor in received})
    engine.shutdown()


class SplitEngine:
    """A receiver whose calls go to all of its ranks, as vLLM sends them."""

    def __init__(self, name: str) -> None:
        self.name, self.version = name, -1
        self.ranks: list[int] = []
        self.received: list[dict[str, torch.Tensor]] = []
        context = multiprocessing.get_context("fork")  # what vLLM takes to import is paid once
        self._calls = []
        for own_rank in range(RANKS):
            here, there = context.Pipe()
            context.Process(target=rank_process, args=(own_rank, there), daemon=True).start()
            self._calls.append(here)

    async def check_manifest(self, manifest: Manifest) -> None:
        manifest.check_against(MANIFEST)

    async def join_transfer(self, rendezvous: Rendezvous, rank: int) -> None:
        self.ranks = await self._all("join", {"rendezvous": rendezvous.to_wire(), "rank": rank})

    async def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> int:
        self.received, self.version = await self._all("receive", manifest.to_wire()), version
        return version

    async def _all(self, method: str, argument: Any) -> list[Any]:
        for calls in self._calls:
            calls.send((method, argument))
        return await asyncio.gather(*(asyncio.to_thread(calls.recv) for calls in self._calls))


class Sender:
    """The learner's rank 0."""

    version = 0

    def __init__(self) -> None:
        self._publisher = WeightPublisher(
            MANIFEST,
            lambda: iter(weights(self.version).items()),
            rank=0,
            device=torch.device("cpu"),
            transport="gloo",
            timeout_s=TIMEOUT_S,
        )

    async def manifest(self) -> Manifest:
        return MANIFEST

    async def open_transfer(self, epoch: int, num_receivers: int) -> Rendezvous:
        return self._publisher.open_transfer(epoch, num_receivers)

    async def join_transfer(self, rendezvous: Rendezvous) -> None:
        await asyncio.to_thread(self._publisher.join_transfer, rendezvous)

    async def send_weights(self, bucket_bytes: int, epoch: int, step: VersionStep | None = None) -> None:
        await asyncio.to_thread(self._publisher.send, bucket_bytes, epoch)


async def main() -> None:
    engines, sender = [SplitEngine(f"rollout/{n}") for n in range(ENGINES)], Sender()
    how = {"bucket_bytes": BUCKET_BYTES, "wave_size": 0, "max_attempts": 1, "ranks_of_receiver": RANKS}
    canary = {"canary_interval": 0, "canary_tolerance": Tolerance(1.0, 0.0), "probe": None}
    sync = WeightSync(sender, FixedMembers(*engines), **how, **canary)
    equal = []
    for version in (1, 2):
        sender.version = version
        await sync.publish(version)
        expected = weights(version)
        equal += [
            set(found) == set(expected) and all(torch.equal(found[name], expected[name]) for name in expected)
            for engine in engines
            for found in engine.received
        ]
    sys.stdout.write(json.dumps({"ranks": [engine.ranks for engine in engines], "equal": equal}) + "\n")
    sys.stdout.flush()


@pytest.mark.slow
def test_every_rank_of_every_engine_receives_every_tensor_of_each_push() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ranks"] == [[1, 2], [3, 4]], "rank 0 sends"
    assert found["equal"] == [True] * 8, "two pushes, two engines, two ranks"


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    asyncio.run(main())
