"""PromptPrefetcher: the next prompts are read and processed while the rollout actors are busy with others."""

from __future__ import annotations

import asyncio

from mobula.cluster.records.trajectory import Prompt
from mobula.cluster.roles import Prompts


class PromptPrefetcher:
    """Hands out the prompts of `prompts` in order, of which up to `num_prefetched` are prepared before they are
    requested.

    A prompt comes with the cursor that belongs to it: the source's own runs ahead.
    """

    def __init__(self, prompts: Prompts, num_prefetched: int) -> None:
        self._prompts = prompts
        self._ready: asyncio.Queue[tuple[Prompt, int]] = asyncio.Queue(num_prefetched)

    async def prepare(self) -> None:
        """Prepare prompts for as long as it runs.

        Raises:
            DatasetError: nothing in the data is usable.
        """
        while True:
            # Reading and processing a picture would hold up every other task of the driver.
            prompt = await asyncio.to_thread(self._prompts.next)
            await self._ready.put((prompt, self._prompts.cursor))

    async def next(self) -> tuple[Prompt, int]:
        """The next prompt, and how many places of the sequence have been passed with it."""
        return await self._ready.get()
