"""RestoringReplay: the replay buffer as the driver sees it, whichever process plays it.

A buffer that dies or hangs is ended, and another one is made from the ledger: the same groups in the same order, the
same leases. What was under way is asked for again. The journal goes on in a new segment, and a record that is written
twice says nothing new.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

from cluster.replay_buffer import DUPLICATE
from cluster.replay_ledger import Holdings, ReplayLedger
from cluster.restarts import RestartBudget
from cluster.restoration import Restoration
from cluster.roles import Replay, ReplayStats
from cluster.trajectory import ScoredGroup

_logger = logging.getLogger(__name__)


class Buffer(Replay, Protocol):
    """One process that plays the buffer: `cluster.replay_client.ReplayClient`."""

    async def start(self) -> None:
        """Wait until the process answers."""
        ...

    async def restore(self, holdings: Holdings) -> None: ...

    async def commit(self, version: int, groups: Sequence[ScoredGroup]) -> None: ...

    async def abort(self, groups: Sequence[ScoredGroup]) -> None: ...

    async def resume(self, version: int, group_ids: Sequence[str]) -> None: ...

    async def forget(self, version: int) -> None: ...

    async def is_alive(self) -> None: ...

    async def close(self) -> None: ...

    def kill(self) -> None:
        """End the process at once, whatever it does."""
        ...


class RestoringReplay:
    """Implements `cluster.roles.Replay` and `cluster.recovery.JournalledReplay`.

    Groups are put one after the other, so that the buffer's order is known. `take` and `reserve` may wait for others,
    so a deadline of theirs travels; any other call that is not answered in time means that the buffer hangs.
    """

    def __init__(
        self,
        buffer: Buffer,
        spawn: Callable[[], Awaitable[Buffer]],
        *,
        budget: RestartBudget,
        on_lost: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`spawn()` starts the process of another buffer; `on_lost` is told `replay_died` or `replay_hung`."""
        self._buffer = buffer
        self._spawn = spawn
        self._ledger = ReplayLedger()
        self._restoration = Restoration("replay", self._bring_back, budget=budget, on_lost=on_lost, clock=clock)

    async def reserve(self, group: ScoredGroup) -> None:
        if self._ledger.has_seen(group.summary.group_id):
            self._ledger.num_rejected[DUPLICATE] += 1
            return
        await self._restoration.outliving(lambda: self._buffer.reserve(group), is_patient=True)
        self._ledger.reserve(group)

    async def put(self, groups: Sequence[ScoredGroup]) -> None:
        for group in groups:
            if not self._ledger.is_reserved(group.summary.group_id):
                await self.reserve(group)
        await self._restoration.outliving(lambda: self._buffer.put(groups))
        self._ledger.put(_ids(groups))

    async def reject(self, group_id: str, reason: str) -> None:
        await self._restoration.outliving(lambda: self._buffer.reject(group_id, reason))
        self._ledger.reject(group_id, reason)

    async def take(self, num_groups: int) -> list[ScoredGroup]:
        groups = await self._restoration.outliving(lambda: self._buffer.take(num_groups), is_patient=True)
        self._ledger.take(_ids(groups))
        return groups

    async def commit(self, version: int, groups: Sequence[ScoredGroup]) -> None:
        await self._restoration.outliving(lambda: self._buffer.commit(version, groups))

    async def release(self, groups: Sequence[ScoredGroup]) -> None:
        await self._restoration.outliving(lambda: self._buffer.release(groups))
        self._ledger.release(_ids(groups))

    async def abort(self, groups: Sequence[ScoredGroup]) -> None:
        await self._restoration.outliving(lambda: self._buffer.abort(groups))
        self._ledger.abort(_ids(groups))

    async def resume(self, version: int, group_ids: Sequence[str]) -> None:
        await self._restoration.outliving(lambda: self._buffer.resume(version, group_ids))

    async def forget(self, version: int) -> None:
        await self._restoration.outliving(lambda: self._buffer.forget(version))

    async def stats(self) -> ReplayStats:
        """Of the process that plays the buffer now; rejected groups are those of the whole run."""
        stats = await self._restoration.outliving(lambda: self._buffer.stats())
        return replace(stats, num_rejected=dict(self._ledger.num_rejected))

    def lose(self, error: Exception) -> None:
        """Somebody found the buffer dead or silent."""
        self._restoration.lose(error)

    async def ping(self) -> None:
        """Return while the buffer's process lives; what was asked of one that has been replaced says nothing."""
        asked = self._buffer
        try:
            await asked.is_alive()
        except Exception:
            if self._buffer is asked:
                raise

    async def close(self) -> None:
        await self._buffer.close()

    async def _bring_back(self, error: Exception) -> None:
        self._buffer.kill()
        self._buffer = await self._spawn()
        await self._buffer.start()
        holdings = self._ledger.holdings()
        await self._buffer.restore(holdings)
        _logger.info(
            "the replay buffer is back with %d groups reserved, %d ready and %d leased",
            len(holdings.reserved),
            len(holdings.ready),
            len(holdings.leased),
        )


def _ids(groups: Sequence[ScoredGroup]) -> list[str]:
    return [group.summary.group_id for group in groups]
