"""A sampler whose tokens are known beforehand: what it samples is a pure function of where it samples."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
from fakes import turns

from mobula.actors.samplers.huggingface import GroupProgress, StopStrings
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.media import ProcessedMedia
from mobula.cluster.records.partial_response import Attempt, Emit, SampledSequence
from mobula.cluster.records.trajectory import FinishReason, Prompt, WeightSpan
from mobula.cluster.roles import SamplingSettings


def token_at(prompt_id: str, sibling: int, position: int) -> int:
    """The token that greedy decoding finds there."""
    return (len(prompt_id) * 7919 + sibling * 104729 + position * 31) % 50021


class KnownSampler:
    """Decodes one token of every unfinished sibling in each step; `lengths[i]` is where sibling i ends.

    `before_step(step)` may wait, or raise the failure of the engine.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        chunk_tokens: int,
        before_step: Callable[[int], Awaitable[None]] = lambda step: turns(1),
        version: int = 0,
    ) -> None:
        self.version = version
        self.num_sampled = 0
        self._lengths = lengths
        self._chunk_tokens = chunk_tokens
        self._before_step = before_step

    async def start(self) -> None: ...

    def coming(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def sample(
        self, prompt: Prompt, media: Sequence[ProcessedMedia], settings: SamplingSettings, attempt: Attempt, emit: Emit
    ) -> list[SampledSequence]:
        progress = GroupProgress(
            prompt, settings, attempt, emit, chunk_tokens=self._chunk_tokens, stop_strings=StopStrings("", ())
        )
        step = 0
        while unfinished := progress.unfinished():
            await self._before_step(step)
            for sibling in unfinished:
                progress.add(sibling, self._token(prompt, sibling, progress.siblings[sibling].num_tokens))
                self.num_sampled += 1
            progress.report()
            step += 1
        return progress.finished()

    async def close(self) -> None: ...

    def _token(self, prompt: Prompt, sibling: int, position: int) -> SampledSequence:
        token_id = token_at(prompt.prompt_id, sibling, position)
        is_last = position + 1 == self._lengths[sibling]
        return SampledSequence(
            TokenActions(np.array([token_id], dtype=np.int32)),
            np.array([-position], dtype=np.float32),
            (WeightSpan(self.version, 0, 1),),
            FinishReason.STOP if is_last else None,
        )


def content(sequence: SampledSequence) -> tuple[list[int], list[float], FinishReason | None]:
    """What must not depend on interruptions."""
    return sequence.actions.token_ids.tolist(), sequence.logprobs.tolist(), sequence.finish_reason


async def for_ever(step: int) -> None:
    await asyncio.Event().wait()
