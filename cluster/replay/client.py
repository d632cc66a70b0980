"""The replay buffer as the driver sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.records.arrow import RecordedGroup
from cluster.records.trajectory import ScoredGroup
from cluster.replay.ledger import Holdings
from cluster.runtime.ray_actors import answer, kill, stop


@dataclass(frozen=True)
class ReplayDeadlines:
    """How long each call may take, in seconds."""

    start_s: float  # until the process answers
    call_s: float
    reserve_s: float  # it may wait for the learner
    sign_s: float  # a sign of life
    stop_s: float


class ReplayClient:
    """Typed calls to one `ReplayBuffer` actor, each with its deadline."""

    def __init__(self, handle: Any, deadlines: ReplayDeadlines, *, is_journalled: bool) -> None:
        """`handle` is the Ray handle of a `ReplayBuffer`. Only a journal looks into groups: without one the buffer is
        told of them, and spared the references, which Ray counts in every process that holds one.
        """
        self._handle = handle
        self._deadlines = deadlines
        self._is_journalled = is_journalled

    async def start(self) -> None:
        """Wait until the buffer's process answers."""
        what = "replay/0 to start (timeouts.start_s)"
        await answer(self._handle.ping.remote(), timeout_s=self._deadlines.start_s, what=what)

    async def restore(self, holdings: Holdings) -> None:
        told = replace(
            holdings,
            reserved=tuple(map(self._told, holdings.reserved)),
            ready=tuple(map(self._told, holdings.ready)),
            leased=tuple(map(self._told, holdings.leased)),
        )
        await self._call(self._handle.restore.remote(told), "take over the groups of the buffer before it")

    async def reserve(self, group: ScoredGroup) -> None:
        await self._room(
            self._handle.reserve.remote(self._told(group)), f"make room for group {group.summary.group_id}"
        )

    async def reserve_all(self, groups: Sequence[ScoredGroup]) -> None:
        what = f"hold {len(groups)} groups for which there is room"
        await self._call(self._handle.reserve_all.remote([self._told(group) for group in groups]), what)

    async def make_ready(self, new: Sequence[ScoredGroup], group_ids: Sequence[str]) -> None:
        first = group_ids[0] if group_ids else "of no prompt"
        call = self._handle.make_ready.remote([self._told(group) for group in new], list(group_ids))
        await self._call(call, f"store {len(group_ids)} groups, the first {first}")

    async def reject(self, group_id: str, reason: str) -> None:
        await self._call(self._handle.reject.remote(group_id, reason), f"count rejected group {group_id}")

    async def lease(self, group_ids: Sequence[str]) -> None:
        await self._call(self._handle.lease.remote(list(group_ids)), f"lease {len(group_ids)} groups")

    async def commit(self, version: int, groups: Sequence[ScoredGroup]) -> None:
        bare = [replace(group, group=None) for group in groups]  # the journal has it
        await self._call(self._handle.commit.remote(version, bare), f"write down what makes version {version}")

    async def end_leases(self, group_ids: Sequence[str]) -> None:
        await self._call(self._handle.end_leases.remote(list(group_ids)), f"release {len(group_ids)} groups")

    async def abort(self, groups: Sequence[ScoredGroup]) -> None:
        told = [self._told(group) for group in groups]
        await self._call(self._handle.abort.remote(told), f"take {len(groups)} groups back")

    async def resume(self, version: int, group_ids: Sequence[str]) -> None:
        await self._call(self._handle.resume.remote(version, list(group_ids)), f"go on from version {version}")

    async def forget(self, version: int) -> None:
        await self._call(self._handle.forget.remote(version), f"forget what led to version {version}")

    async def recall(self, group_ids: Sequence[str]) -> dict[str, RecordedGroup]:
        return await self._call(self._handle.recall.remote(list(group_ids)), f"look {len(group_ids)} groups up")

    async def exchange(self, group: ScoredGroup) -> None:
        what = f"exchange lost group {group.summary.group_id}"
        await self._call(self._handle.exchange.remote(self._told(group)), what)

    async def is_alive(self) -> None:
        """Return while the process lives, however busy it is."""
        what = "replay/0 to answer that it is alive"
        await answer(self._handle.is_alive.remote(), timeout_s=self._deadlines.sign_s, what=what)

    async def close(self) -> None:
        """Drop every reference and end the process."""
        await stop(self._handle, timeout_s=self._deadlines.stop_s, what="replay/0")

    def kill(self) -> None:
        """End the process at once, whatever it does."""
        kill(self._handle)

    def _told(self, group: ScoredGroup) -> ScoredGroup:
        """What the buffer needs of a group that the driver has as well."""
        return group if self._is_journalled else ScoredGroup(group.summary, None, ())

    async def _call(self, reference: Any, what: str) -> Any:
        return await answer(reference, timeout_s=self._deadlines.call_s, what=f"replay/0 to {what}")

    async def _room(self, reference: Any, what: str) -> None:
        await answer(
            reference, timeout_s=self._deadlines.reserve_s, what=f"replay/0 to {what} (timeouts.backpressure_s)"
        )
