"""NoReceivers: the weights of a run that samples nothing stay where they are."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class NoReceivers:
    """Implements `mobula.cluster.roles.Weights` where there is no rollout actor."""

    @asynccontextmanager
    async def settling(self) -> AsyncIterator[None]:
        yield

    async def settled(self) -> None: ...

    async def publish(self, version: int) -> int:
        return version
