"""WeightSync: bring every rollout actor to one version, a few at a time, and prove it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mobula.cluster.errors import (
    CanaryError,
    DeadlineError,
    ManifestError,
    RolloutError,
    WeightSyncError,
    WorkerDiedError,
)
from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.runtime.concurrency import outcomes
from mobula.cluster.weight_sync.interfaces import Members, Receiver, Sender
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.cluster.weight_sync.tolerance import Gap, Tolerance
from mobula.cluster.workers.supervisor import background_tasks

_logger = logging.getLogger(__name__)

_Outcomes = Mapping[Receiver, BaseException | None]  # the error of each receiver, None where it succeeded

RECEIVER_LOST = (WorkerDiedError, DeadlineError, RolloutError)  # it is gone itself; others may be a peer's fault


@dataclass(frozen=True)
class Push:
    """Times of one push, and the result of its canary."""

    version: int
    num_bytes: int
    seconds: float
    canary_gap: float | None  # mean absolute log-prob difference; None where the canary did not run
    num_lost: int = 0  # receivers that did not survive it


@dataclass(frozen=True)
class _Wave:
    """Receivers that are updated together, and the transfer group in which they meet the sender."""

    epoch: int
    receivers: tuple[Receiver, ...]


@dataclass(frozen=True)
class _Underway:
    """A push that is not over."""

    version: int
    manifest: Manifest
    num_receivers: int
    started: float  # time.monotonic()
    reached: set[Receiver] = field(default_factory=set)  # that hold these very weights


@dataclass(frozen=True)
class _Sent:
    """A wave that the sender has sent everything to; `arrivals` holds the outcome of each of its receivers."""

    wave: _Wave
    arrivals: asyncio.Future[list[Any]]


class WeightSync:
    """Pushes the learner's weights to all receivers over transfer groups, `wave_size` of them at a time.

    While one wave receives, the engines of the others go on generating. The order within a wave: every receiver agrees
    to the manifest; sender and receivers broadcast; every receiver names its version; the canary compares log-probs of
    a probe prompt (with an image) with the learner's. The learner is needed until it has sent the last wave and scored
    the probe: within `settling()` it may go on then, while the receivers of that wave load what they have and score it.

    A transfer group is numbered by its epoch and never repaired. When the sender fails, the receivers that died or did
    not answer are lost, and those that failed with them push again in a group of a new epoch. A receiver that is alive
    and has not got what the sender has sent is given what the learner then has, as a late joiner is. No engine is left
    on weights of unknown origin: a receiver has the new version, or a newer one, or it is lost.
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
        canary_tolerance: Tolerance,
        ranks_of_receiver: int = 1,
        probe: Prompt,
    ) -> None:
        """`wave_size` 0 is all at once; a receiver takes `ranks_of_receiver` ranks of a transfer group; `max_attempts`
        bounds how often a wave is sent to, and a receiver given weights, in one push.
        """
        self._sender = sender
        self._members = members
        self._bucket_bytes = bucket_bytes
        self._wave_size = wave_size
        self._max_attempts = max_attempts
        self._canary_interval = canary_interval
        self._canary_tolerance = canary_tolerance
        self._ranks_of_receiver = ranks_of_receiver
        self._probe = probe
        self._arrival_listeners: list[Callable[[int], Awaitable[None]]] = []
        self._listeners: list[Callable[[Push], Awaitable[None]]] = []
        self._announcement_listeners: list[Callable[[int], None]] = []
        self._announced = -1
        self._manifest: Manifest | None = None
        self._agreed: set[int] = set()  # receivers, by identity, that have agreed to the manifest
        self._waves: list[_Wave] = []
        self._epoch = 0
        self._one_push = asyncio.Lock()
        self._tasks: asyncio.TaskGroup | None = None
        self._settling: asyncio.Task[None] | None = None
        self._first_expected: np.ndarray | None = None  # log-probs of the probe at the first push
        self._has_checked_changed = False  # the canary has run on weights other than those of the first push
        self.num_pushes = 0

    def on_announced(self, listener: Callable[[int], None]) -> None:
        """Call `listener` with the version once its push is under way; every receiver will have it or be lost."""
        self._announcement_listeners.append(listener)

    def on_arrived(self, listener: Callable[[int], Awaitable[None]]) -> None:
        """Call `listener` with the version of every push whose receivers have it, before they are compared with the
        learner."""
        self._arrival_listeners.append(listener)

    def on_published(self, listener: Callable[[Push], Awaitable[None]]) -> None:
        """Call `listener` after every push that succeeded."""
        self._listeners.append(listener)

    @asynccontextmanager
    async def settling(self) -> AsyncIterator[None]:
        """While the body runs, `publish` returns once all is sent, and receivers settle beside it.

        Raises:
            WeightSyncError, ManifestError: what `publish` raises of receivers; the body was cancelled.
        """
        async with background_tasks() as self._tasks:
            try:
                yield
                await self.settled()
            finally:
                self._tasks = None

    async def settled(self) -> None:
        """Wait until every receiver serves what was published last, or is lost."""
        if self._settling is not None:
            await self._settling
            self._settling = None

    async def publish(self, version: int) -> int:
        """Bring all receivers to `version`; returns it. A push waits for the receivers of the one before it.

        Raises:
            ManifestError: a receiver's checkpoint has other tensors; nothing was sent to it.
            WeightSyncError: the receivers of a wave live, and yet no attempt got the weights through.
            CanaryError: the weights arrived, and no engine computes what the learner computes.
            WorkerDiedError, DeadlineError: the sender is gone.
        """
        async with self._one_push:
            # Receivers of the push before may still load: this one must not overtake it.
            await self.settled()
            started = time.monotonic()
            manifest = await self._agreed_manifest()
            receivers = self._members.receivers()
            push = _Underway(version, manifest, len(receivers), started)
            self._members.announced(version)
            sent: _Sent | None = None
            for wave in self._cut(receivers):
                # Wave after wave: engines of the other waves sample meanwhile.
                await self._arrive(push, sent)
                sent = await self._send(push, wave)
            await self._announce(version)  # where there was no receiver
            await self._canary_tolerance.rounding.measure(self._sender, self._probe)
            expected = await self._expected() if self._is_canary_due() else None
            self.num_pushes += 1
            settle = self._settle(push, sent, expected)
            if self._tasks is None:
                await settle
            else:
                self._settling = self._tasks.create_task(settle, name=f"settle version {version}")
        return version

    async def _settle(self, push: _Underway, sent: _Sent | None, expected: np.ndarray | None) -> None:
        """See the last wave of a push to its end, and tell of the push. `expected` is what the canary compares with."""
        await self._arrive(push, sent)
        for arrival_listener in self._arrival_listeners:
            await arrival_listener(push.version)
        gap = None if expected is None else await self._canary(push, expected)
        self._members.published(push.version)
        num_lost = max(0, push.num_receivers - len(self._members.receivers()))
        done = Push(push.version, push.manifest.num_bytes, time.monotonic() - push.started, gap, num_lost)
        for listener in self._listeners:
            await listener(done)

    async def admit(self, receiver: Receiver) -> int:
        """Bring a late joiner to the learner's version through the object store; returns that version.

        Joiner and pushes do not wait for each other: the joiner may serve once the published version is its own, and
        takes part in later pushes.
        """
        manifest = await self._sender.manifest()
        await receiver.check_manifest(manifest)
        version, packed = await self._sender.export_weights(self._bucket_bytes)
        await self._load(receiver, manifest, packed, version)
        return version

    async def _load(self, receiver: Receiver, manifest: Manifest, packed: Any, version: int) -> None:
        await receiver.load_weights(manifest, self._bucket_bytes, packed, version)
        loaded = await receiver.weight_version()
        if loaded != version:
            raise WeightSyncError(f"{receiver.name} was given version {version} and is at {loaded}")

    async def _agreed_manifest(self) -> Manifest:
        """The manifest, after each receiver that has not yet compared it with its checkpoint has done so."""
        if self._manifest is None:
            self._manifest = await self._sender.manifest()
        manifest = self._manifest
        fresh = [r for r in self._members.receivers() if id(r) not in self._agreed]
        checks = await outcomes(*(r.check_manifest(manifest) for r in fresh))
        for receiver, outcome in zip(fresh, checks, strict=True):
            if isinstance(outcome, RECEIVER_LOST):
                self._members.lose(receiver, outcome)
            elif isinstance(outcome, Exception):
                raise outcome
        self._agreed = {id(r) for r in self._members.receivers()}
        return manifest

    def _cut(self, receivers: Sequence[Receiver]) -> list[tuple[Receiver, ...]]:
        size = self._wave_size or max(1, len(receivers))
        return [tuple(receivers[i : i + size]) for i in range(0, len(receivers), size)]

    async def _send(self, push: _Underway, receivers: tuple[Receiver, ...]) -> _Sent | None:
        """Sends to one wave, in up to `max_attempts` epochs; None if all of its receivers are lost."""
        waiting, last = receivers, BaseException()
        for _ in range(self._max_attempts):
            attempt = await self._try_to_send(push, waiting)
            if isinstance(attempt, _Sent):
                return attempt
            failed = self._living(attempt)
            if not failed:
                return None
            waiting, last = tuple(failed), next(iter(failed.values()))
            _logger.warning("version %d goes out again to %s: %s", push.version, _names(waiting), last)
        raise self._not_reached(push, waiting, last)

    async def _try_to_send(self, push: _Underway, receivers: tuple[Receiver, ...]) -> _Sent | _Outcomes:
        """Sends one broadcast to `receivers`; returns the outcome of each if the sender could not send everything."""
        try:
            wave = await self._meet(receivers)
        except _NotMet as failure:
            return failure.outcomes
        # Receivers first: a broadcast that begins without them would wait for its deadline.
        arrivals = asyncio.gather(*(self._receive(push, r) for r in receivers), return_exceptions=True)
        try:
            sent, error = await outcomes(
                self._sender.send_weights(self._bucket_bytes, wave.epoch),
                self._announce(push.version),  # behind the calls: what it sets off comes after them
            )
        except BaseException:
            arrivals.cancel()
            raise
        if sent is None and error is None:
            return _Sent(wave, arrivals)
        arrived = dict(zip(receivers, await arrivals, strict=True))  # None: the receiver has all of the version
        if error is not None:
            raise error
        if isinstance(sent, RECEIVER_LOST):
            raise sent
        await self._disband(wave)
        return arrived

    async def _announce(self, version: int) -> None:
        if version > self._announced:
            self._announced = version
            for listener in self._announcement_listeners:
                listener(version)

    async def _arrive(self, push: _Underway, sent: _Sent | None) -> None:
        """Wait for the receivers of a wave that was sent to."""
        if sent is None:
            return
        arrived: _Outcomes = dict(zip(sent.wave.receivers, await sent.arrivals, strict=True))
        if any(error is not None for error in arrived.values()):
            await self._disband(sent.wave)
        await self._bring_along(push, self._living(arrived))

    async def _bring_along(self, push: _Underway, failed: Mapping[Receiver, BaseException]) -> None:
        """Loads the learner's current weights into living receivers that missed the push, as late joiners do."""
        for _ in range(self._max_attempts):
            if not failed:
                return
            _logger.warning("version %d did not arrive: %s", push.version, "; ".join(map(str, failed.values())))
            version, packed = await self._sender.export_weights(self._bucket_bytes)
            loads = await outcomes(*(self._load(r, push.manifest, packed, version) for r in failed))
            for receiver, error in zip(failed, loads, strict=True):
                if error is None:
                    self._has(push, receiver, version)
            failed = self._living(dict(zip(failed, loads, strict=True)))
        if failed:
            raise self._not_reached(push, tuple(failed), next(iter(failed.values())))

    def _living(self, results: _Outcomes) -> dict[Receiver, BaseException]:
        """The receivers that failed and are alive, with their errors; the others that failed are lost.

        Raises:
            ManifestError: a receiver's checkpoint has other tensors.
            CancelledError: the call of a receiver was cancelled.
        """
        failed = {receiver: error for receiver, error in results.items() if error is not None}
        for receiver, error in failed.items():
            # A cancelled call has not failed: the push ends, and nothing is sent again.
            if isinstance(error, ManifestError) or not isinstance(error, Exception):
                raise error
            if isinstance(error, RECEIVER_LOST):
                self._members.lose(receiver, error)
        return {receiver: error for receiver, error in failed.items() if not isinstance(error, RECEIVER_LOST)}

    def _not_reached(self, push: _Underway, receivers: tuple[Receiver, ...], last: BaseException) -> WeightSyncError:
        error = WeightSyncError(
            f"version {push.version} did not reach {_names(receivers)} in {self._max_attempts} attempts "
            f"(weight_sync.max_attempts): {last}"
        )
        error.__cause__ = last
        return error

    async def _receive(self, push: _Underway, receiver: Receiver) -> None:
        received = await receiver.receive_weights(push.manifest, self._bucket_bytes, push.version)
        if received != push.version:
            raise WeightSyncError(f"after the push of version {push.version}: {receiver.name} is at {received}")
        self._has(push, receiver, push.version)

    def _has(self, push: _Underway, receiver: Receiver, version: int) -> None:
        if version == push.version:
            push.reached.add(receiver)
        self._members.synced(receiver, version)

    async def _meet(self, receivers: tuple[Receiver, ...]) -> _Wave:
        """Returns the transfer group of exactly these receivers; makes one in a new epoch if there is none."""
        for wave in self._waves:
            if wave.receivers == receivers:
                return wave
        for wave in [w for w in self._waves if set(w.receivers) & set(receivers) or self._is_empty(w)]:
            await self._disband(wave)
        # Never an epoch twice: a late member of the group before must not join this one.
        self._epoch += 1
        wave = _Wave(self._epoch, receivers)
        width = self._ranks_of_receiver
        rendezvous = await self._sender.open_transfer(wave.epoch, width * len(receivers))
        joined, *met = await outcomes(
            self._sender.join_transfer(rendezvous),
            *(r.join_transfer(rendezvous, 1 + width * index) for index, r in enumerate(receivers)),
        )
        if isinstance(joined, RECEIVER_LOST):
            raise joined
        self._waves.append(wave)
        if joined is not None or any(outcome is not None for outcome in met):
            await self._disband(wave)
            broken = WeightSyncError(f"transfer epoch {wave.epoch} did not come together")
            raise _NotMet({r: outcome or joined or broken for r, outcome in zip(receivers, met, strict=True)})
        return wave

    def _is_canary_due(self) -> bool:
        """At the first push, at each one until the weights have changed, and then at every `canary_interval`-th.

        An engine that keeps old weights equals the learner until the learner's weights change.
        """
        is_on = self._canary_interval > 0
        return is_on and (not self._has_checked_changed or self.num_pushes % self._canary_interval == 0)

    async def _expected(self) -> np.ndarray:
        """The learner's log-probs of the probe."""
        expected = await self._sender.sequence_logprobs(self._probe)
        if self._first_expected is None:
            self._first_expected = expected
        elif not np.array_equal(expected, self._first_expected):
            self._has_checked_changed = True
        return expected

    def _is_empty(self, wave: _Wave) -> bool:
        """Whether no engine of the wave receives any more."""
        return not set(wave.receivers) & set(self._members.receivers())

    async def _disband(self, wave: _Wave) -> None:
        self._waves.remove(wave)
        await self._sender.leave_transfer(wave.epoch)

    async def _canary(self, push: _Underway, expected: np.ndarray) -> float | None:
        """Compares log-probs of the probe; an engine that differs is lost, and if all differ the push fails.

        Asks only engines with the weights of this push: later joiners may have a newer version.
        """
        receivers = [receiver for receiver in self._members.receivers() if receiver in push.reached]
        scores = await outcomes(*(r.prompt_logprobs(self._probe) for r in receivers))
        gaps: dict[Receiver, np.ndarray] = {}
        for receiver, logprobs in zip(receivers, scores, strict=True):
            if isinstance(logprobs, RECEIVER_LOST):
                self._members.lose(receiver, logprobs)
            elif isinstance(logprobs, Exception):
                raise logprobs
            else:
                gaps[receiver] = np.abs(logprobs - expected)
        wrong = {r: Gap.of(gap) for r, gap in gaps.items() if not self._canary_tolerance.accepts(gap)}
        if wrong and len(wrong) == len(gaps):
            raise self._canary_error(wrong)
        for receiver, excess in wrong.items():
            self._members.lose(receiver, self._canary_error({receiver: excess}))
        right = [Gap.of(gap).mean for receiver, gap in gaps.items() if receiver not in wrong]
        return max(right, default=None)

    def _canary_error(self, wrong: dict[Receiver, Gap]) -> CanaryError:
        off = ", ".join(f"{receiver.name} by {gap}" for receiver, gap in wrong.items())
        return CanaryError(
            f"log-probs of the probe prompt differ from the learner's: {off} "
            f"({self._canary_tolerance}): the weights arrived as they were sent, so engine and learner compute "
            "otherwise, or a part of the engine kept old weights"
        )


class _NotMet(Exception):
    """A transfer group did not come together."""

    def __init__(self, results: dict[Receiver, BaseException | None]) -> None:
        super().__init__("a transfer group did not come together")
        self.outcomes = results


def _names(receivers: Sequence[Receiver]) -> str:
    return ", ".join(receiver.name for receiver in receivers)
