"""A rollout actor whose sampler is known beforehand, and which kills itself in the middle of a group."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
from interrupted import KnownSampler

from mobula.actors.rollout.actor import MediaBatcher, RolloutActor
from mobula.actors.rollout.server import PromptServer
from mobula.cluster.records.media import MediaReader


class Digits:
    """A tokenizer of a kind."""

    def decode(self, token_ids: np.ndarray, skip_special_tokens: bool) -> str:
        return " ".join(str(token) for token in token_ids)


class KnownRollout(RolloutActor):
    """The real actor but for its engine. The first one of a folder dies before its step `dies_at`."""

    def __init__(self, folder: Path, lengths: tuple[int, ...], chunk_tokens: int, dies_at: int, token_s: float) -> None:
        PromptServer.__init__(self)
        self._folder = folder
        self._dies_at = dies_at
        self._token_s = token_s
        self._sampler = KnownSampler(lengths, chunk_tokens, self._before_step)
        self._tokenizer = Digits()
        self._hidden_ids = frozenset()
        self._media = MediaBatcher(MediaReader(timeout_s=10, max_items=1))

    async def ping(self) -> int:
        return 0

    async def _before_step(self, step: int) -> None:
        await asyncio.sleep(self._token_s)
        if step == self._dies_at:
            try:
                (self._folder / "died").touch(exist_ok=False)
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)
