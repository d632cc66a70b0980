"""Protocols of senders and receivers of weights."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import numpy as np

from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.weight_sync.changes import PushedChanges, VersionStep
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.cluster.weight_sync.transport import Rendezvous


class Sender(Protocol):
    """The learner group. Every call goes to all ranks."""

    async def manifest(self) -> Manifest: ...

    async def open_transfer(self, epoch: int, num_receivers: int) -> Rendezvous:
        """Opens the rendezvous of a transfer group; members may join when it returns."""

    async def join_transfer(self, rendezvous: Rendezvous) -> None: ...

    async def send_weights(self, bucket_bytes: int, epoch: int, step: VersionStep | None) -> PushedChanges | None:
        """Broadcasts to the members of a transfer group: whole tensors, or with `step` their changes. A sender that
        computes no checksum may return None.

        Raises:
            WeightSyncError: the group of that epoch is unusable, or was lost with a restarted learner.
        """

    async def leave_transfer(self, epoch: int) -> None:
        """Closes a transfer group; waiting members fail at once."""

    async def export_weights(self, bucket_bytes: int) -> tuple[int, Sequence[Any]]:
        """Returns the learner's version, and a reference to each packed bucket with its digest, owned by the caller."""

    async def sequence_logprobs(self, prompt: Prompt, num_copies: int = 1) -> np.ndarray:
        """Returns float32 [P - 1], computed in a batch of `num_copies` of the prompt."""


class Receiver(Protocol):
    """A rollout actor."""

    name: str

    async def check_manifest(self, manifest: Manifest) -> None: ...

    async def join_transfer(self, rendezvous: Rendezvous, rank: int) -> None:
        """Joins the transfer group as rank `rank`; a split engine takes the ranks from `rank` on."""

    async def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> int:
        """Receives a push, of changes if the manifest has that payload; returns the version that it then serves.

        Raises:
            WeightSyncError: the push failed, or has changes since another version than the receiver holds.
        """

    async def load_weights(self, manifest: Manifest, bucket_bytes: int, buckets: Sequence[Any], version: int) -> None:
        """Loads whole tensors from packed buckets, each an array or a reference to one."""

    async def weight_version(self) -> int: ...

    async def prompt_logprobs(self, prompt: Prompt) -> np.ndarray: ...


class Members(Protocol):
    """The actors that receive weights; they join and leave during the run."""

    def receivers(self) -> Sequence[Receiver]: ...

    def announced(self, version: int) -> None:
        """Called before a push: receivers are brought to `version`, and receivers that join later must have it."""

    def synced(self, receiver: Receiver, version: int) -> None:
        """Called when `receiver` serves `version`."""

    def published(self, version: int) -> None:
        """Called when every receiver serves `version` or is lost; older weights must not be sampled from."""

    def lose(self, receiver: Receiver, error: Exception) -> None:
        """Called when `receiver` failed a push: its weights may be partly old and partly new."""


class NoReceivers:
    """Implements `mobula.cluster.roles.Weights` where there is no rollout actor."""

    @asynccontextmanager
    async def settling(self) -> AsyncIterator[None]:
        yield

    async def settled(self) -> None: ...

    async def publish(self, version: int) -> int:
        return version
