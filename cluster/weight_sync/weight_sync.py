"""WeightSync: brings every rollout actor to one version, in waves, and verifies it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

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
from mobula.cluster.weight_sync.changes import PushedChanges, VersionStep
from mobula.cluster.weight_sync.interfaces import Members, Receiver, Sender
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.cluster.weight_sync.tolerance import Gap, Tolerance
from mobula.cluster.workers.supervisor import background_tasks

_logger = logging.getLogger(__name__)

_Outcomes = Mapping[Receiver, BaseException | None]  # the error of each receiver, None where it succeeded

RECEIVER_LOST = (WorkerDiedError, DeadlineError, RolloutError)  # the receiver itself failed; others may be a peer's


@dataclass(frozen=True)
class Push:
    """Size and time of one push, and the result of its canary."""

    version: int
    num_bytes: int  # sent to each receiver of the last wave
    seconds: float
    canary_gap: float | None  # mean absolute log-prob difference; None if the canary did not run
    num_lost: int = 0  # receivers that were lost
    num_resent: int = 0  # receivers that missed the push and were sent whole tensors
    changed_share: float | None = None  # of all elements, since the push before; None for whole tensors
    manifest_sha256: str = ""  # of names, shapes and dtypes
    checksum: str = ""  # of the weights (`weights_checksum`), hexadecimal; empty if it is not known
    receivers: Mapping[str, str] = field(default_factory=dict)  # name -> `checksum`, `checksum+canary` or `newer`
    canary_by_class: Mapping[str, float] = field(default_factory=dict)  # class of token -> as `canary_gap`


@dataclass(frozen=True)
class _Wave:
    """Receivers that are updated together, and their transfer group with the sender."""

    epoch: int
    receivers: tuple[Receiver, ...]


@dataclass(frozen=True)
class _Underway:
    version: int
    manifest: Manifest
    num_receivers: int
    started: float  # of the event loop, in seconds
    reached: set[Receiver] = field(default_factory=set)  # receivers with exactly these weights
    resent: set[Receiver] = field(default_factory=set)  # receivers that missed it


@dataclass(frozen=True)
class _Sent:
    """A wave to which everything was sent; `arrivals` has the outcome of each of its receivers."""

    wave: _Wave
    arrivals: asyncio.Future[list[Any]]
    contents: PushedChanges | None  # None: not known


@dataclass(eq=False)
class WeightSync:
    """Pushes the learner's weights to all receivers over transfer groups, `wave_size` receivers at a time.

    While one wave receives, the engines of the others generate. Order within a wave: every receiver checks the
    manifest; sender and receivers broadcast; every receiver returns its version; the canary compares log-probs of a
    probe prompt (with an image) with the learner's. The learner is needed until it has sent the last wave and scored
    the probe: within `settling()` it may then continue, while the receivers of that wave load the weights and score it.

    A transfer group is numbered by its epoch and never repaired. If the sender fails, receivers that died or did not
    answer are lost, and the others receive the push again in a group of a new epoch. A living receiver that missed a
    push gets the learner's current weights, as a late joiner. So a receiver has the new version, a newer one, or it is
    lost.

    With a manifest of payload `delta`, a wave gets the changes since the version of the push before if all of its
    receivers hold that version, and otherwise whole tensors; so do further attempts.
    """

    sender: Sender
    members: Members
    _: KW_ONLY
    bucket_bytes: int
    wave_size: int  # 0 updates all receivers at once
    max_attempts: int  # of a push to a wave, and of giving weights to a receiver that missed it
    canary_interval: int
    canary_tolerance: Tolerance
    ranks_of_receiver: int = 1  # ranks of a transfer group that a receiver takes
    probe: Prompt
    # class of token -> log-probs of the probe that it has, bool [P - 1]
    probe_classes: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.on_announced: list[Callable[[int], None]] = []  # its push has begun: receivers will have it or be lost
        self.on_arrived: list[Callable[[int], Awaitable[None]]] = []  # all receivers have it, before the canary
        self.on_published: list[Callable[[Push], Awaitable[None]]] = []  # after every successful push
        self.on_admitted: list[Callable[[str, int], None]] = []  # name and version of a late joiner with weights
        self._announced = -1
        self._manifest: Manifest | None = None
        self._agreed: set[int] = set()  # receivers, by identity, that have agreed to the manifest
        self._held = WeakKeyDictionary[Receiver, int]()  # versions of receivers that hold exactly these weights
        self._base_version: int | None = None  # that the sender holds for changes
        self._waves: list[_Wave] = []
        self._epoch = 0
        self._one_push = asyncio.Lock()
        self._tasks: asyncio.TaskGroup | None = None
        self._settling: asyncio.Task[None] | None = None
        self._first_expected: np.ndarray | None = None  # log-probs of the probe at the first push
        self._has_checked_changed = False  # the canary has run on weights other than those of the first push
        self.num_pushes = 0

    @asynccontextmanager
    async def settling(self) -> AsyncIterator[None]:
        """While the body runs, `publish` returns once everything is sent; receivers settle in the background."""
        async with background_tasks() as self._tasks:
            try:
                yield
                await self.settled()
            finally:
                self._tasks = None

    async def settled(self) -> None:
        if self._settling is not None:
            await self._settling
            self._settling = None

    async def publish(self, version: int) -> int:
        """Brings all receivers to `version`; returns it. Waits for the receivers of the push before."""
        async with self._one_push:
            # Receivers may still load the push before: this one must not overtake it.
            await self.settled()
            started = asyncio.get_running_loop().time()
            manifest = await self._agreed_manifest()
            receivers = self.members.receivers()
            push = _Underway(version, manifest, len(receivers), started)
            self.members.announced(version)
            sent: _Sent | None = None
            size = self.wave_size or max(1, len(receivers))
            waves = [tuple(receivers[i : i + size]) for i in range(0, len(receivers), size)]
            for number, wave in enumerate(waves, start=1):
                # One wave after the other: engines of the other waves sample meanwhile.
                await self._arrive(push, sent)
                sent = await self._send(push, wave, is_last=number == len(waves))
            await self._announce(version)  # if there was no receiver
            await self.canary_tolerance.rounding.measure(self.sender, self.probe)
            # Each push is compared until the weights have changed: an engine that keeps old weights equals the learner.
            is_on = self.canary_interval > 0
            is_due = is_on and (not self._has_checked_changed or self.num_pushes % self.canary_interval == 0)
            expected = await self._expected() if is_due else None
            self.num_pushes += 1
            settle = self._settle(push, sent, expected)
            if self._tasks is None:
                await settle
            else:
                self._settling = self._tasks.create_task(settle, name=f"settle version {version}")
        return version

    async def _settle(self, push: _Underway, sent: _Sent | None, expected: np.ndarray | None) -> None:
        """Waits for the last wave of a push, runs the canary and calls the listeners. `expected`: float32 [P - 1], the
        learner's log-probs of the probe; None skips the canary."""
        contents = None if sent is None else sent.contents
        num_changed = None if contents is None else contents.num_changed
        await self._arrive(push, sent)
        for on_arrived in self.on_arrived:
            await on_arrived(push.version)
        gap: float | None = None
        by_class: dict[str, float] = {}
        if expected is not None:
            gap, by_class = await self._canary(push, expected)
        self.members.published(push.version)
        # Every way of sending compares digests of all bytes.
        how = "checksum" if gap is None else "checksum+canary"
        done = Push(
            push.version,
            push.manifest.num_bytes if contents is None else contents.num_bytes,
            asyncio.get_running_loop().time() - push.started,
            gap,
            num_lost=max(0, push.num_receivers - len(self.members.receivers())),
            num_resent=len(push.resent),
            changed_share=None if num_changed is None else num_changed / max(1, push.manifest.num_elements),
            manifest_sha256=push.manifest.sha256,
            checksum="" if contents is None or not contents.checksum else f"{contents.checksum:032x}",
            receivers={r.name: how if r in push.reached else "newer" for r in self.members.receivers()},
            canary_by_class=by_class,
        )
        for on_published in self.on_published:
            await on_published(done)

    async def admit(self, receiver: Receiver) -> int:
        """Brings a late joiner to the learner's version through the object store; returns that version.

        Joiner and pushes do not wait for each other: the joiner may serve once its version is published, and takes part
        in later pushes.
        """
        manifest = await self.sender.manifest()
        await receiver.check_manifest(manifest)
        version, packed = await self.sender.export_weights(self.bucket_bytes)
        await self._load(receiver, manifest, packed, version)
        for listener in self.on_admitted:
            listener(receiver.name, version)
        return version

    async def _load(self, receiver: Receiver, manifest: Manifest, packed: Any, version: int) -> None:
        await receiver.load_weights(manifest, self.bucket_bytes, packed, version)
        loaded = await receiver.weight_version()
        if loaded != version:
            raise WeightSyncError(f"{receiver.name} was given version {version} and is at {loaded}")
        self._held[receiver] = version

    async def _agreed_manifest(self) -> Manifest:
        if self._manifest is None:
            self._manifest = await self.sender.manifest()
        manifest = self._manifest
        fresh = [r for r in self.members.receivers() if id(r) not in self._agreed]
        checks = await outcomes(*(r.check_manifest(manifest) for r in fresh))
        for receiver, outcome in zip(fresh, checks, strict=True):
            if isinstance(outcome, RECEIVER_LOST):
                self.members.lose(receiver, outcome)
            elif isinstance(outcome, Exception):
                raise outcome
        self._agreed = {id(r) for r in self.members.receivers()}
        return manifest

    async def _send(self, push: _Underway, receivers: tuple[Receiver, ...], *, is_last: bool) -> _Sent | None:
        """Sends to one wave, in up to `max_attempts` epochs; None if all of its receivers are lost."""
        waiting, last = receivers, BaseException()
        base = self._base_version
        has_base = base is not None and all(self._held.get(receiver) == base for receiver in receivers)
        step = VersionStep(push.version, base if has_base else None, is_last)
        if is_last:
            self._base_version = None
        for _ in range(self.max_attempts):
            attempt = await self._try_to_send(push, waiting, step)
            if isinstance(attempt, _Sent):
                if is_last:
                    self._base_version = push.version
                return attempt
            step = replace(step, base_version=None)
            failed = self._living(attempt)
            if not failed:
                return None
            push.resent.update(failed)
            waiting, last = tuple(failed), next(iter(failed.values()))
            _logger.warning("version %d goes out again to %s: %s", push.version, _names(waiting), last)
        raise self._not_reached(push, waiting, last)

    async def _try_to_send(
        self, push: _Underway, receivers: tuple[Receiver, ...], step: VersionStep
    ) -> _Sent | _Outcomes:
        """Sends one push to `receivers`; returns the outcome of each if the sender could not send everything."""
        is_delta = push.manifest.payload == "delta"
        manifest = replace(push.manifest, base_version=step.base_version) if is_delta else push.manifest
        wave = await self._meet(receivers)
        if not isinstance(wave, _Wave):
            return wave
        # Receivers first: a broadcast that begins without them would wait for its deadline.
        arrivals = asyncio.gather(*(self._receive(push, r, manifest) for r in receivers), return_exceptions=True)
        try:
            sent, error = await outcomes(
                self.sender.send_weights(self.bucket_bytes, wave.epoch, step if is_delta else None),
                self._announce(push.version),  # after the calls, so that calls of listeners follow them
            )
        except BaseException:
            arrivals.cancel()
            raise
        if not isinstance(sent, BaseException) and error is None:
            return _Sent(wave, arrivals, sent)
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
            for listener in self.on_announced:
                listener(version)

    async def _arrive(self, push: _Underway, sent: _Sent | None) -> None:
        if sent is None:
            return
        arrived: _Outcomes = dict(zip(sent.wave.receivers, await sent.arrivals, strict=True))
        if any(error is not None for error in arrived.values()):
            await self._disband(sent.wave)
        await self._bring_along(push, self._living(arrived))

    async def _bring_along(self, push: _Underway, failed: Mapping[Receiver, BaseException]) -> None:
        """Loads the learner's current weights into living receivers that missed the push, as late joiners do."""
        for _ in range(self.max_attempts):
            if not failed:
                return
            _logger.warning("version %d did not arrive: %s", push.version, "; ".join(map(str, failed.values())))
            push.resent.update(failed)
            version, packed = await self.sender.export_weights(self.bucket_bytes)
            loads = await outcomes(*(self._load(r, push.manifest, packed, version) for r in failed))
            for receiver, error in zip(failed, loads, strict=True):
                if error is None:
                    self._has(push, receiver, version)
            failed = self._living(dict(zip(failed, loads, strict=True)))
        if failed:
            raise self._not_reached(push, tuple(failed), next(iter(failed.values())))

    def _living(self, results: _Outcomes) -> dict[Receiver, BaseException]:
        """Returns the living receivers that failed, with their errors; marks the other failed receivers as lost."""
        failed = {receiver: error for receiver, error in results.items() if error is not None}
        for receiver, error in failed.items():
            # A cancelled call has not failed: the push ends, and nothing is sent again.
            if isinstance(error, ManifestError) or not isinstance(error, Exception):
                raise error
            if isinstance(error, RECEIVER_LOST):
                self.members.lose(receiver, error)
        return {receiver: error for receiver, error in failed.items() if not isinstance(error, RECEIVER_LOST)}

    def _not_reached(self, push: _Underway, receivers: tuple[Receiver, ...], last: BaseException) -> WeightSyncError:
        error = WeightSyncError(
            f"version {push.version} did not reach {_names(receivers)} in {self.max_attempts} attempts "
            f"(weight_sync.max_attempts): {last}"
        )
        error.__cause__ = last
        return error

    async def _receive(self, push: _Underway, receiver: Receiver, manifest: Manifest) -> None:
        self._held.pop(receiver, None)
        received = await receiver.receive_weights(manifest, self.bucket_bytes, push.version)
        if received != push.version:
            raise WeightSyncError(f"after the push of version {push.version}: {receiver.name} is at {received}")
        self._has(push, receiver, push.version)

    def _has(self, push: _Underway, receiver: Receiver, version: int) -> None:
        self._held[receiver] = version
        if version == push.version:
            push.reached.add(receiver)
        self.members.synced(receiver, version)

    async def _meet(self, receivers: tuple[Receiver, ...]) -> _Wave | _Outcomes:
        """Returns the transfer group of exactly these receivers; opens one in a new epoch if there is none. Returns the
        outcome of each receiver if the group did not come together."""
        for wave in self._waves:
            if wave.receivers == receivers:
                return wave
        present = set(self.members.receivers())
        for wave in [w for w in self._waves if set(w.receivers) & set(receivers) or not set(w.receivers) & present]:
            await self._disband(wave)
        # Every epoch is new: a late member of an earlier group must not join this one.
        self._epoch += 1
        wave = _Wave(self._epoch, receivers)
        width = self.ranks_of_receiver
        rendezvous = await self.sender.open_transfer(wave.epoch, width * len(receivers))
        joined, *met = await outcomes(
            self.sender.join_transfer(rendezvous),
            *(r.join_transfer(rendezvous, 1 + width * index) for index, r in enumerate(receivers)),
        )
        if isinstance(joined, RECEIVER_LOST):
            raise joined
        self._waves.append(wave)
        if joined is not None or any(outcome is not None for outcome in met):
            await self._disband(wave)
            broken = WeightSyncError(f"transfer epoch {wave.epoch} did not come together")
            return {r: outcome or joined or broken for r, outcome in zip(receivers, met, strict=True)}
        return wave

    async def _expected(self) -> np.ndarray:
        expected = await self.sender.sequence_logprobs(self.probe)
        if self._first_expected is None:
            self._first_expected = expected
        elif not np.array_equal(expected, self._first_expected):
            self._has_checked_changed = True
        return expected

    async def _disband(self, wave: _Wave) -> None:
        self._waves.remove(wave)
        await self.sender.leave_transfer(wave.epoch)

    async def _canary(self, push: _Underway, expected: np.ndarray) -> tuple[float | None, dict[str, float]]:
        """Compares log-probs of the probe; an engine that differs is lost, and if all differ the push fails. Returns
        the largest mean difference of the others, of all tokens and by class."""
        # Only engines with the weights of this push: later joiners may have a newer version.
        receivers = [receiver for receiver in self.members.receivers() if receiver in push.reached]
        scores = await outcomes(*(r.prompt_logprobs(self.probe) for r in receivers))
        gaps: dict[Receiver, np.ndarray] = {}
        for receiver, logprobs in zip(receivers, scores, strict=True):
            if isinstance(logprobs, RECEIVER_LOST):
                self.members.lose(receiver, logprobs)
            elif isinstance(logprobs, Exception):
                raise logprobs
            else:
                gaps[receiver] = np.abs(logprobs - expected)
        wrong = {r: Gap.of(gap) for r, gap in gaps.items() if not self.canary_tolerance.accepts(gap)}
        if wrong and len(wrong) == len(gaps):
            raise self._canary_error(wrong)
        for receiver, excess in wrong.items():
            self.members.lose(receiver, self._canary_error({receiver: excess}))
        right = [gap for receiver, gap in gaps.items() if receiver not in wrong]
        if not right:
            return None, {}
        by_class = {
            name: max(float(gap[mask].mean()) for gap in right)
            for name, mask in self.probe_classes.items()
            if len(mask) == len(expected)
        }
        return max(Gap.of(gap).mean for gap in right), by_class

    def _canary_error(self, wrong: dict[Receiver, Gap]) -> CanaryError:
        off = ", ".join(f"{receiver.name} by {gap}" for receiver, gap in wrong.items())
        return CanaryError(
            f"log-probs of the probe prompt differ from the learner's: {off} "
            f"({self.canary_tolerance}): the weights arrived as they were sent, so engine and learner compute "
            "otherwise, or a part of the engine kept old weights"
        )


def _names(receivers: Sequence[Receiver]) -> str:
    return ", ".join(receiver.name for receiver in receivers)
