"""The replay buffer as the driver sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cluster.ray_group import answer
from cluster.roles import ReplayStats
from cluster.trajectory import ScoredGroup


class ReplayClient:
    """Typed calls to the `ReplayBuffer` actor. `take` may wait for rollouts, so it has a deadline of its own."""

    def __init__(self, handle: Any, *, call_s: float, take_s: float) -> None:
        """`handle` is the Ray handle of a `ReplayBuffer`."""
        self._handle = handle
        self._call_s = call_s
        self._take_s = take_s

    async def put(self, group: ScoredGroup) -> None:
        await self._call(self._handle.put.remote(group), f"store group {group.summary.group_id}")

    async def reject(self, group_id: str, reason: str) -> None:
        await self._call(self._handle.reject.remote(group_id, reason), f"count rejected group {group_id}")

    async def take(self, num_groups: int) -> list[ScoredGroup]:
        what = f"replay/0 to hold {num_groups} finished groups"
        return await answer(self._handle.take.remote(num_groups), timeout_s=self._take_s, what=what)

    async def release(self, groups: Sequence[ScoredGroup]) -> None:
        await self._call(self._handle.release.remote(list(groups)), f"release {len(groups)} groups")

    async def stats(self) -> ReplayStats:
        return await self._call(self._handle.stats.remote(), "give its statistics")

    async def _call(self, reference: Any, what: str) -> Any:
        return await answer(reference, timeout_s=self._call_s, what=f"replay/0 to {what}")
