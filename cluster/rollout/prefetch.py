"""PromptPrefetcher: reads and processes the next prompts while the rollout actors sample earlier ones."""

from __future__ import annotations

import asyncio

from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.roles import Prompts


class PromptPrefetcher:
    """Returns the prompts of `prompts` in order. Up to `num_prefetched` are prepared ahead; with 0 each is chosen when
    it is asked for, because the order depends on the groups that are finished until then.

    Each prompt comes with its own cursor, because the cursor of the source is ahead.
    """

    def __init__(self, prompts: Prompts, num_prefetched: int) -> None:
        self._prompts = prompts
        self._is_ahead = num_prefetched > 0
        self._ready: asyncio.Queue[tuple[Prompt, int]] = asyncio.Queue(num_prefetched)

    async def prepare(self) -> None:
        """Prepares prompts until it is cancelled.

        Raises:
            DatasetError: no row of the data set is usable.
        """
        while self._is_ahead:
            # On a thread: reading and processing an image would block the driver's event loop.
            prompt = await asyncio.to_thread(self._prompts.next)
            await self._ready.put((prompt, self._prompts.cursor))

    async def next(self) -> tuple[Prompt, int]:
        """Returns the next prompt and the source's cursor after it."""
        if not self._is_ahead:
            return await asyncio.to_thread(self._prompts.next), self._prompts.cursor
        return await self._ready.get()
