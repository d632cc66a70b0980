"""WeightSync: bring every rollout actor to one version, a few at a time, and prove it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cluster.concurrency import outcomes, run_all
from cluster.errors import CanaryError, DeadlineError, ManifestError, RolloutError, WeightSyncError, WorkerDiedError
from cluster.trajectory import Prompt
from cluster.weight_sync.manifest import Manifest
from cluster.weight_sync.transport import Rendezvous

_logger = logging.getLogger(__name__)

LOST = (WorkerDiedError, DeadlineError, RolloutError)  # who fails a push like this is gone; else it may be a peer's fault


class Sender(Protocol):
    """The learner group as weight sync sees it. Every call addresses all ranks; rank 0 sends."""

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
        """Forget one transfer group; who still waits in it fails at once."""
        ...

    async def export_weights(self, bucket_bytes: int) -> tuple[int, Any]:
        """The learner's version, and a reference to its packed buckets that the caller owns."""
        ...

    async def sequence_logprobs(self, prompt: Prompt) -> np.ndarray: ...


class Receiver(Protocol):
    """One rollout actor as weight sync sees it."""

    name: str

    async def check_manifest(self, manifest: Manifest) -> None: ...

    async def join_transfer(self, rendezvous: Rendezvous, rank: int) -> None: ...

    async def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> int:
        """Returns the version that it then serves."""
        ...

    async def load_weights(self, manifest: Manifest, bucket_bytes: int, buckets: Any, version: int) -> None: ...

    async def weight_version(self) -> int: ...

    async def prompt_logprobs(self, prompt: Prompt) -> np.ndarray: ...


class Members(Protocol):
    """Who receives weights now. Membership changes while the run goes on."""

    def receivers(self) -> Sequence[Receiver]: ...

    def announced(self, version: int) -> None:
        """The receivers of now are brought to `version`; who joins from now on must have it."""
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


@dataclass(frozen=True)
class Push:
    """What one push took and what its canary found."""

    version: int
    num_bytes: int
    seconds: float
    canary_gap: float | None  # largest absolute log-prob difference; None where the canary did not run
    num_lost: int = 0  # receivers that did not survive it


@dataclass(frozen=True)
class _Wave:
    """Receivers that are updated together, and the transfer group in which they meet the sender."""

    epoch: int
    receivers: tuple[Receiver, ...]


class WeightSync:
    """Pushes the learner's weights to all receivers over transfer groups, `wave_size` of them at a time.

    While one wave receives, the engines of the others go on generating. The order within a wave: every receiver agrees
    to the manifest; sender and receivers broadcast; every receiver names its version; the canary compares log-probs of
    a probe prompt (with a picture) with the learner's.

    A transfer group is numbered by its epoch and never repaired. When a push fails, the receivers that died or did not
    answer are lost, and those that failed with them push again in a group of a new epoch. Nobody is left on weights of
    unknown origin: a receiver has the new version, or it is lost.
    """

    def __init__(
        self,
        sender: Sender,
        members: Members,
        *,
        bucket_bytes: int,
        wave_size: int,
        max_attempts: int,
        canary_interval: int,
        canary_tolerance: float,
        probe: Prompt,
    ) -> None:
        """`wave_size` 0 is all at once; `max_attempts` bounds the epochs that one wave may use up in one push."""
        self._sender = sender
        self._members = members
        self._bucket_bytes = bucket_bytes
        self._wave_size = wave_size
        self._max_attempts = max_attempts
        self._canary_interval = canary_interval
        self._canary_tolerance = canary_tolerance
        self._probe = probe
        self._listeners: list[Callable[[Push], Awaitable[None]]] = []
        self._heralds: list[Callable[[int], None]] = []
        self._announced = -1
        self._manifest: Manifest | None = None
        self._agreed: set[int] = set()  # receivers, by identity, that have agreed to the manifest
        self._waves: list[_Wave] = []
        self._epoch = 0
        self._one_push = asyncio.Lock()
        self.num_pushes = 0

    def on_announced(self, listener: Callable[[int], None]) -> None:
        """Call `listener` with the version once its push is under way; every receiver will have it or be lost."""
        self._heralds.append(listener)

    def on_published(self, listener: Callable[[Push], Awaitable[None]]) -> None:
        """Call `listener` after every push that succeeded."""
        self._listeners.append(listener)

    async def publish(self, version: int) -> int:
        """Bring all receivers to `version`; returns it.

        Raises:
            ManifestError: a receiver's checkpoint has other tensors; nothing was sent to it.
            WeightSyncError: the receivers of a wave live, and yet no epoch got the weights through.
            CanaryError: the weights arrived but no engine computes what the learner computes.
            WorkerDiedError, DeadlineError: the sender is gone.
        """
        async with self._one_push:
            started = time.monotonic()
            manifest = await self._agreed_manifest()
            receivers = self._members.receivers()
            self._members.announced(version)
            for wave in self._cut(receivers):
                await self._update(manifest, wave, version)
            self.num_pushes += 1
            gap = await self._canary()
            self._members.published(version)
            num_lost = len(receivers) - len(self._members.receivers())
            push = Push(version, manifest.num_bytes, time.monotonic() - started, gap, max(0, num_lost))
        for listener in self._listeners:
            await listener(push)
        return version

    async def admit(self, receiver: Receiver) -> int:
        """Bring a late joiner to the learner's version through the object store; returns that version.

        It does not wait for a push, nor a push for it: the joiner may serve once the published version is its own, and
        from then on it is a receiver like the others.
        """
        manifest = await self._sender.manifest()
        await receiver.check_manifest(manifest)
        version, packed = await self._sender.export_weights(self._bucket_bytes)
        await receiver.load_weights(manifest, self._bucket_bytes, packed, version)
        found = await receiver.weight_version()
        if found != version:
            raise WeightSyncError(f"{receiver.name} was given version {version} and is at {found}")
        return version

    async def _agreed_manifest(self) -> Manifest:
        """The manifest, to which every receiver has agreed once in its life."""
        if self._manifest is None:
            self._manifest = await self._sender.manifest()
        manifest = self._manifest
        fresh = [r for r in self._members.receivers() if id(r) not in self._agreed]
        found = await outcomes(*(r.check_manifest(manifest) for r in fresh))
        for receiver, outcome in zip(fresh, found, strict=True):
            if isinstance(outcome, LOST):
                self._members.lose(receiver, outcome)
            elif isinstance(outcome, Exception):
                raise outcome
        self._agreed = {id(r) for r in self._members.receivers()}
        return manifest

    def _cut(self, receivers: Sequence[Receiver]) -> list[tuple[Receiver, ...]]:
        size = self._wave_size or max(1, len(receivers))
        return [tuple(receivers[i : i + size]) for i in range(0, len(receivers), size)]

    async def _update(self, manifest: Manifest, receivers: tuple[Receiver, ...], version: int) -> None:
        """Bring one wave to `version`, in as many epochs as its losses take."""
        waiting, last = receivers, Exception()
        for _ in range(self._max_attempts):
            found = await self._push(manifest, waiting, version)
            failed = {r: error for r, error in found.items() if error is not None}
            for receiver, error in failed.items():
                if isinstance(error, LOST):
                    self._members.lose(receiver, error)
            waiting = tuple(r for r, error in failed.items() if not isinstance(error, LOST))
            if not waiting:
                return
            last = failed[waiting[0]]
            _logger.warning("version %d goes out again to %s: %s", version, _names(waiting), last)
        raise WeightSyncError(
            f"version {version} did not reach {_names(waiting)} in {self._max_attempts} attempts "
            f"(weight_sync.max_attempts): {last}"
        ) from last

    async def _push(
        self, manifest: Manifest, receivers: tuple[Receiver, ...], version: int
    ) -> dict[Receiver, Exception | None]:
        """One broadcast to `receivers`: what became of each."""
        try:
            wave = await self._meet(receivers)
        except _NotMet as failure:
            return failure.found
        sent, *received, told = await outcomes(
            self._sender.send_weights(self._bucket_bytes, wave.epoch),
            *(self._receive(manifest, r, version) for r in receivers),
            self._announce(version),  # behind the calls: what it sets off comes after them
        )
        if told is not None:
            raise told
        if isinstance(sent, LOST):
            raise sent
        if sent is not None or any(outcome is not None for outcome in received):
            await self._disband(wave)
        return {r: self._blame(sent, outcome) for r, outcome in zip(receivers, received, strict=True)}

    async def _announce(self, version: int) -> None:
        if version > self._announced:
            self._announced = version
            for listener in self._heralds:
                listener(version)

    def _blame(self, sent: Exception | None, received: Exception | None) -> Exception | None:
        """Who says that it received everything did, even if the sender saw a peer fail."""
        if isinstance(received, ManifestError):
            raise received
        return received

    async def _receive(self, manifest: Manifest, receiver: Receiver, version: int) -> None:
        found = await receiver.receive_weights(manifest, self._bucket_bytes, version)
        if found != version:
            raise WeightSyncError(f"after the push of version {version}: {receiver.name} is at {found}")
        self._members.synced(receiver, version)

    async def _meet(self, receivers: tuple[Receiver, ...]) -> _Wave:
        """The transfer group of exactly these receivers: the one there is, or one of a new epoch."""
        for wave in self._waves:
            if wave.receivers == receivers:
                return wave
        for wave in [w for w in self._waves if set(w.receivers) & set(receivers) or self._is_empty(w)]:
            await self._disband(wave)
        self._epoch += 1
        wave = _Wave(self._epoch, receivers)
        rendezvous = await self._sender.open_transfer(wave.epoch, len(receivers))
        joined, *met = await outcomes(
            self._sender.join_transfer(rendezvous),
            *(r.join_transfer(rendezvous, rank) for rank, r in enumerate(receivers, start=1)),
        )
        if isinstance(joined, LOST):
            raise joined
        self._waves.append(wave)
        if joined is not None or any(outcome is not None for outcome in met):
            await self._disband(wave)
            broken = WeightSyncError(f"transfer epoch {wave.epoch} did not come together")
            raise _NotMet({r: outcome or joined or broken for r, outcome in zip(receivers, met, strict=True)})
        return wave

    def _is_empty(self, wave: _Wave) -> bool:
        """Whether nobody of the wave receives any more."""
        return not set(wave.receivers) & set(self._members.receivers())

    async def _disband(self, wave: _Wave) -> None:
        self._waves.remove(wave)
        await self._sender.leave_transfer(wave.epoch)

    async def _canary(self) -> float | None:
        """Engines that compute something else are lost; if all of them do, the push itself is at fault."""
        receivers = self._members.receivers()
        if self._canary_interval == 0 or (self.num_pushes - 1) % self._canary_interval != 0 or not receivers:
            return None
        [expected] = await run_all(self._sender.sequence_logprobs(self._probe))
        found = await outcomes(*(r.prompt_logprobs(self._probe) for r in receivers))
        gaps: dict[Receiver, float] = {}
        for receiver, logprobs in zip(receivers, found, strict=True):
            if isinstance(logprobs, LOST):
                self._members.lose(receiver, logprobs)
            elif isinstance(logprobs, Exception):
                raise logprobs
            else:
                gaps[receiver] = float(np.abs(logprobs - expected).max())
        wrong = {r: gap for r, gap in gaps.items() if not gap <= self._canary_tolerance}  # a NaN is wrong too
        if wrong and len(wrong) == len(gaps):
            raise self._canary_error(wrong)
        for receiver, gap in wrong.items():
            self._members.lose(receiver, self._canary_error({receiver: gap}))
        right = [gap for receiver, gap in gaps.items() if receiver not in wrong]
        return max(right, default=None)

    def _canary_error(self, wrong: dict[Receiver, float]) -> CanaryError:
        off = ", ".join(f"{receiver.name} by {gap:.3g}" for receiver, gap in wrong.items())
        return CanaryError(
            f"log-probs of the probe prompt differ from the learner's: {off} "
            f"(weight_sync.canary_tolerance={self._canary_tolerance:g}): the push did not arrive as it was sent"
        )


class _NotMet(Exception):
    """A transfer group did not come together."""

    def __init__(self, found: dict[Receiver, Exception | None]) -> None:
        super().__init__("a transfer group did not come together")
        self.found = found


def _names(receivers: Sequence[Receiver]) -> str:
    return ", ".join(receiver.name for receiver in receivers)
