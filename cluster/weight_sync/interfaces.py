"""Interfaces of the participants of a push: the learner, which sends, and receivers that join and leave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.cluster.weight_sync.transport import Rendezvous


class Sender(Protocol):
    """The learner group as weight sync sees it. Every call addresses all ranks."""

    async def manifest(self) -> Manifest: ...

    async def open_transfer(self, epoch: int, num_receivers: int) -> Rendezvous:
        """Start a rendezvous for one transfer group; members may join from then on."""
        ...

    async def join_transfer(self, rendezvous: Rendezvous) -> None: ...

    async def send_weights(self, bucket_bytes: int, epoch: int) -> None:
        """Broadcast to the members of one transfer group.

        Raises:
            WeightSyncError: the group of that epoch is unusable, or gone with a learner that was restored.
        """
        ...

    async def leave_transfer(self, epoch: int) -> None:
        """Forget one transfer group; members that still wait in it fail at once."""
        ...

    async def export_weights(self, bucket_bytes: int) -> tuple[int, Sequence[Any]]:
        """The learner's version, and a reference to each of its packed buckets with its digest, owned by the caller."""
        ...

    async def sequence_logprobs(self, prompt: Prompt, num_copies: int = 1) -> np.ndarray:
        """float32 [P - 1], as it comes out of a batch of so many copies of the prompt."""
        ...


class Receiver(Protocol):
    """One rollout actor as weight sync sees it."""

    name: str

    async def check_manifest(self, manifest: Manifest) -> None: ...

    async def join_transfer(self, rendezvous: Rendezvous, rank: int) -> None:
        """Become rank `rank` of the transfer group; one of several ranks takes those from `rank` on."""
        ...

    async def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> int:
        """Returns the version that it then serves."""
        ...

    async def load_weights(self, manifest: Manifest, bucket_bytes: int, buckets: Sequence[Any], version: int) -> None:
        """Load packed buckets, each of them bytes or a reference to them."""
        ...

    async def weight_version(self) -> int: ...

    async def prompt_logprobs(self, prompt: Prompt) -> np.ndarray: ...


class Members(Protocol):
    """The actors that receive weights at present. Membership changes while the run goes on."""

    def receivers(self) -> Sequence[Receiver]: ...

    def announced(self, version: int) -> None:
        """Present receivers are brought to `version`; receivers that join from now on must have it."""
        ...

    def synced(self, receiver: Receiver, version: int) -> None:
        """`receiver` serves `version` from now on."""
        ...

    def published(self, version: int) -> None:
        """Every receiver serves `version` or is lost; what serves less may not be sampled from."""
        ...

    def lose(self, receiver: Receiver, error: Exception) -> None:
        """`receiver` failed a push: its weights are neither old nor new."""
        ...
