"""The replay buffer as the driver sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cluster.ray_group import answer
from cluster.roles import ReplayStats
from cluster.trajectory import ScoredGroup


class ReplayClient:
    """Typed calls to the `ReplayBuffer` actor. `take` may wait for rollouts and `reserve` for the learner, so these
    have deadlines of their own.
    """

    def __init__(self, handle: Any, *, call_s: float, take_s: float, reserve_s: float) -> None:
        """`handle` is the Ray handle of a `ReplayBuffer`."""
        self._handle = handle
        self._call_s = call_s
        self._take_s = take_s
        self._reserve_s = reserve_s

    async def reserve(self, group: ScoredGroup) -> None:
        await self._room(self._handle.reserve.remote(group), f"make room for group {group.summary.group_id}")

    async def put(self, groups: Sequence[ScoredGroup]) -> None:
        first = groups[0].summary.group_id if groups else "of no prompt"
        await self._room(self._handle.put.remote(list(groups)), f"store {len(groups)} groups, the first {first}")

    async def reject(self, group_id: str, reason: str) -> None:
        await self._call(self._handle.reject.remote(group_id, reason), f"count rejected group {group_id}")

    async def take(self, num_groups: int) -> list[ScoredGroup]:
        what = f"replay/0 to hold {num_groups} finished groups"
        return await answer(self._handle.take.remote(num_groups), timeout_s=self._take_s, what=what)

    async def commit(self, version: int, groups: Sequence[ScoredGroup]) -> None:
        bare = [replace(group, group=None) for group in groups]  # the journal has it
        await self._call(self._handle.commit.remote(version, bare), f"write down what makes version {version}")

    async def release(self, groups: Sequence[ScoredGroup]) -> None:
        bare = [replace(group, group=None, reference_logprobs=None) for group in groups]  # it needs no reference to end a lease
        await self._call(self._handle.release.remote(bare), f"release {len(groups)} groups")

    async def resume(self, version: int, group_ids: Sequence[str]) -> None:
        await self._call(self._handle.resume.remote(version, list(group_ids)), f"go on from version {version}")

    async def forget(self, version: int) -> None:
        await self._call(self._handle.forget.remote(version), f"forget what led to version {version}")

    async def stats(self) -> ReplayStats:
        return await self._call(self._handle.stats.remote(), "give its statistics")

    async def _call(self, reference: Any, what: str) -> Any:
        return await answer(reference, timeout_s=self._call_s, what=f"replay/0 to {what}")

    async def _room(self, reference: Any, what: str) -> None:
        await answer(reference, timeout_s=self._reserve_s, what=f"replay/0 to {what} (timeouts.backpressure_s)")
