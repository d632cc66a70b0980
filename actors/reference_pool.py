"""The reference scorers as the loop sees them, and the null object for runs without a KL term."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.ray_group import answer
from cluster.trajectory import ScoredGroup


class ReferencePool:
    """Shares the groups of one step out among the scorers; log-probs stay in the object store, owned by the caller."""

    def __init__(self, handles: Sequence[Any], folder: Path, *, timeout_s: float) -> None:
        """`handles` are Ray handles of `ReferenceScorer`s; `folder` holds the frozen policy once the run has begun."""
        self._handles = list(handles)
        self._folder = folder
        self._timeout_s = timeout_s
        self._is_loaded = False

    async def score(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """The same groups, in order, with `reference_logprobs` set to references."""
        if not self._is_loaded:
            await asyncio.gather(*(self._load(index) for index in range(len(self._handles))))
            self._is_loaded = True
        shares = [list(range(i, len(groups), len(self._handles))) for i in range(len(self._handles))]
        calls = [self._score(i, [groups[j] for j in share]) for i, share in enumerate(shares) if share]
        scored = {group.summary.group_id: group for part in await asyncio.gather(*calls) for group in part}
        return [scored[group.summary.group_id] for group in groups]

    async def _load(self, index: int) -> None:
        what = f"reference/{index} to load {self._folder}"
        await answer(self._handles[index].load.remote(self._folder), timeout_s=self._timeout_s, what=what)

    async def _score(self, index: int, groups: list[ScoredGroup]) -> list[ScoredGroup]:
        """All results of one call appear together, so waiting for the last leaves the others where they are."""
        scorer = self._handles[index]
        if len(groups) == 1:  # Ray takes a list apart only when several results are asked for
            logprobs = [scorer.score_one.remote(groups[0])]
        else:
            logprobs = scorer.score.options(num_returns=len(groups)).remote(groups)
        what = f"reference/{index} to score {len(groups)} groups"
        await answer(logprobs[-1], timeout_s=self._timeout_s, what=what)
        return [replace(g, reference_logprobs=lp) for g, lp in zip(groups, logprobs, strict=True)]


class NullReference:
    """No reference: groups pass as they are."""

    async def score(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        return list(groups)
