"""WeightSync: bring every rollout actor to one version, and prove it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cluster.concurrency import run_all
from cluster.errors import CanaryError, WeightSyncError
from cluster.trajectory import Prompt
from cluster.weight_sync.manifest import Manifest
from cluster.weight_sync.transport import Rendezvous


class Sender(Protocol):
    """The learner group as weight sync sees it. Every call addresses all ranks; rank 0 sends."""

    async def manifest(self) -> Manifest: ...

    async def open_transfer(self, epoch: int, num_receivers: int) -> Rendezvous:
        """Start a rendezvous for one transfer group; members may join from then on."""
        ...

    async def join_transfer(self, rendezvous: Rendezvous) -> None: ...

    async def send_weights(self, bucket_bytes: int) -> None: ...

    async def export_weights(self, bucket_bytes: int) -> Any:
        """A reference to the packed buckets, owned by the caller."""
        ...

    async def sequence_logprobs(self, prompt: Prompt) -> np.ndarray: ...


class Receiver(Protocol):
    """One rollout actor as weight sync sees it."""

    name: str

    async def check_manifest(self, manifest: Manifest) -> None: ...

    async def join_transfer(self, rendezvous: Rendezvous, rank: int) -> None: ...

    async def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> None: ...

    async def load_weights(self, manifest: Manifest, bucket_bytes: int, buckets: Any, version: int) -> None: ...

    async def weight_version(self) -> int: ...

    async def prompt_logprobs(self, prompt: Prompt) -> np.ndarray: ...


@dataclass(frozen=True)
class Push:
    """What one push took and what its canary found."""

    version: int
    num_bytes: int
    seconds: float
    canary_gap: float | None  # largest absolute log-prob difference; None where the canary did not run


class WeightSync:
    """Pushes the learner's weights to all receivers over the transfer group.

    The order of one push: every receiver agrees to the manifest; sender and receivers broadcast; every receiver names
    its version; the canary compares log-probs of a probe prompt (with a picture) with the learner's. A push that
    fails leaves its receivers frozen, never on weights of unknown origin.
    """

    def __init__(
        self,
        sender: Sender,
        receivers: Sequence[Receiver],
        *,
        bucket_bytes: int,
        canary_interval: int,
        canary_tolerance: float,
        probe: Prompt,
    ) -> None:
        self._sender = sender
        self._receivers = list(receivers)
        self._bucket_bytes = bucket_bytes
        self._canary_interval = canary_interval
        self._canary_tolerance = canary_tolerance
        self._probe = probe
        self._listeners: list[Callable[[Push], Awaitable[None]]] = []
        self._manifest: Manifest | None = None
        self._epoch = 0
        self.num_pushes = 0

    def on_published(self, listener: Callable[[Push], Awaitable[None]]) -> None:
        """Call `listener` after every push that succeeded."""
        self._listeners.append(listener)

    async def publish(self, version: int) -> int:
        """Bring all receivers to `version`; returns it.

        Raises:
            ManifestError: a receiver's checkpoint has other tensors; nothing was sent.
            WeightSyncError, DeadlineError: the push failed; the message names who did not answer.
            CanaryError: the weights arrived but an engine does not compute what the learner computes.
        """
        started = time.monotonic()
        manifest = await self._connect()
        await run_all(
            self._sender.send_weights(self._bucket_bytes),
            *(r.receive_weights(manifest, self._bucket_bytes, version) for r in self._receivers),
        )
        await self._check_versions(version)
        self.num_pushes += 1
        push = Push(version, manifest.num_bytes, time.monotonic() - started, await self._canary())
        for listener in self._listeners:
            await listener(push)
        return version

    async def admit(self, receiver: Receiver, version: int) -> None:
        """Bring a late joiner to `version` through the object store; the next push rebuilds the group with it."""
        manifest = await self._sender.manifest()
        await receiver.check_manifest(manifest)
        packed = await self._sender.export_weights(self._bucket_bytes)
        await receiver.load_weights(manifest, self._bucket_bytes, packed, version)
        self._receivers.append(receiver)
        self._manifest = None
        await self._check_versions(version)

    async def _connect(self) -> Manifest:
        """Agree on the manifest and meet, once an epoch: whenever the set of receivers has changed."""
        if self._manifest is not None:
            return self._manifest
        manifest = await self._sender.manifest()
        await run_all(*(r.check_manifest(manifest) for r in self._receivers))
        self._epoch += 1
        rendezvous = await self._sender.open_transfer(self._epoch, len(self._receivers))
        await run_all(
            self._sender.join_transfer(rendezvous),
            *(r.join_transfer(rendezvous, rank) for rank, r in enumerate(self._receivers, start=1)),
        )
        self._manifest = manifest
        return manifest

    async def _check_versions(self, version: int) -> None:
        found = await run_all(*(r.weight_version() for r in self._receivers))
        wrong = [f"{r.name} is at {v}" for r, v in zip(self._receivers, found, strict=True) if v != version]
        if wrong:
            raise WeightSyncError(f"after the push of version {version}: {', '.join(wrong)}")

    async def _canary(self) -> float | None:
        if self._canary_interval == 0 or (self.num_pushes - 1) % self._canary_interval != 0:
            return None
        expected, *found = await run_all(
            self._sender.sequence_logprobs(self._probe), *(r.prompt_logprobs(self._probe) for r in self._receivers)
        )
        gaps = [float(np.abs(logprobs - expected).max()) for logprobs in found]
        wrong = [
            f"{r.name} by {gap:.3g}"
            for r, gap in zip(self._receivers, gaps, strict=True)
            if not gap <= self._canary_tolerance  # a NaN is wrong too
        ]
        if wrong:
            raise CanaryError(
                f"log-probs of the probe prompt differ from the learner's: {', '.join(wrong)} "
                f"(weight_sync.canary_tolerance={self._canary_tolerance:g}): the push did not arrive as it was sent"
            )
        return max(gaps)

