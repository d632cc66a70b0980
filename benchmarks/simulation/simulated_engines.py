"""Engines that decode at a constant rate, and responses of long-tailed length: rollouts without a model."""

from __future__ import annotations

import asyncio
import hashlib
import heapq
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mobula.cluster.records.trajectory import Generated, GroupSummary, Prompt
from mobula.cluster.roles import SamplingSettings

_EPSILON_S = 1e-6  # what sums of seconds may be off by


@dataclass(frozen=True)
class Lengths:
    """Response lengths: lognormal, cut where an engine cuts a response.

    A prompt's lengths are a function of seed and prompt id, so every run of one seed has the same work to do in
    whatever order.
    """

    median: float  # tokens, before the cut
    sigma: float  # of the logarithm; 0: all responses are equal
    max_tokens: int
    num_siblings: int
    seed: int

    def of(self, prompt_id: str) -> np.ndarray:
        """Tokens of each sibling, int64 [num_siblings]."""
        digest = hashlib.sha256(f"{self.seed}/{prompt_id}".encode()).digest()
        normal = np.random.default_rng(int.from_bytes(digest[:8], "big")).standard_normal(self.num_siblings)
        return np.clip(self.median * np.exp(self.sigma * normal), 1, self.max_tokens).astype(np.int64)


@dataclass(frozen=True)
class _Span:
    """One response in its slot, in seconds of the engine's clock."""

    start_s: float
    end_s: float


class SimulatedEngine:
    """Decodes up to `num_slots` responses at a time, each at `tokens_per_s`; the others wait in order of arrival.

    Its clock stands still while it is paused and before its first weights, so seconds here are seconds of decoding.
    When a response starts and ends is known when its group arrives; a group needs one timer.
    """

    def __init__(self, lengths: Lengths, *, num_slots: int, tokens_per_s: float, name: str = "simulated") -> None:
        self.name = name
        self.num_in_flight = 0  # groups
        self._lengths = lengths
        self._tokens_per_s = tokens_per_s
        self._free_from_s = [0.0] * num_slots  # a heap
        self._spans: list[_Span] = []
        self._version_starts_s: list[float] = []  # index: version
        self._decoding = asyncio.Event()
        self._paused_s = 0.0
        self._paused_since_s = 0.0

    @property
    def clock_s(self) -> float:
        now = asyncio.get_running_loop().time() if self._decoding.is_set() else self._paused_since_s
        return now - self._paused_s

    def pause(self) -> None:
        self._paused_since_s = asyncio.get_running_loop().time()
        self._decoding.clear()

    def go_on(self, version: int) -> None:
        """Decode on, each response from its last token, with the weights of `version`."""
        assert version == len(self._version_starts_s), f"version {version}, {len(self._version_starts_s)} was due"
        self._paused_s += asyncio.get_running_loop().time() - self._paused_since_s
        self._decoding.set()
        self._version_starts_s.append(self.clock_s)

    async def generate(self, prompt: Prompt, settings: SamplingSettings) -> Generated:
        """One group, once its slowest sibling is done; its id stands for its bytes."""
        self.num_in_flight += 1
        try:
            spans = [self._take_slot(num_tokens) for num_tokens in self._lengths.of(prompt.prompt_id).tolist()]
            await self._until(max(span.end_s for span in spans))
        finally:
            self.num_in_flight -= 1
        tokens = Counter[int]()
        for span in spans:
            tokens.update(self._tokens_by_version(span))
        return Generated(prompt.prompt_id, summary(prompt, tokens, num_trajectories=len(spans)))

    def busy_s(self, start_s: float, end_s: float) -> float:
        """Slot-seconds of decoding between two moments of its clock."""
        bounds = np.array([(span.start_s, span.end_s) for span in self._spans]).clip(start_s, end_s)
        return float((bounds[:, 1] - bounds[:, 0]).sum())

    def _take_slot(self, num_tokens: int) -> _Span:
        start_s = max(heapq.heappop(self._free_from_s), self.clock_s)
        span = _Span(start_s, start_s + num_tokens / self._tokens_per_s)
        heapq.heappush(self._free_from_s, span.end_s)
        self._spans.append(span)
        return span

    async def _until(self, moment_s: float) -> None:
        while (left_s := moment_s - self.clock_s) > _EPSILON_S:
            await self._decoding.wait()
            await asyncio.sleep(left_s)

    def _tokens_by_version(self, span: _Span) -> dict[int, int]:
        first = bisect_right(self._version_starts_s, span.start_s + _EPSILON_S) - 1
        last = bisect_right(self._version_starts_s, span.end_s - _EPSILON_S) - 1
        ends_s = [*self._version_starts_s[first + 1 : last + 1], span.end_s]
        counts = [0, *(round((end_s - span.start_s) * self._tokens_per_s) for end_s in ends_s)]
        return {first + i: end - start for i, (start, end) in enumerate(pairwise(counts)) if end > start}


class LeastLoaded:
    """Sends each prompt to the engine with the fewest groups in flight."""

    def __init__(self, engines: Sequence[SimulatedEngine]) -> None:
        self._engines = engines

    async def generate(self, prompt: Prompt, settings: SamplingSettings) -> Generated:
        return await min(self._engines, key=lambda engine: engine.num_in_flight).generate(prompt, settings)


def summary(prompt: Prompt, tokens_by_version: Mapping[int, int], *, num_trajectories: int) -> GroupSummary:
    """Of a group that has lengths and nothing else."""
    return GroupSummary(
        group_id=prompt.prompt_id,
        sample_id=prompt.sample_id,
        num_trajectories=num_trajectories,
        num_steps=(sum(tokens_by_version.values()) // num_trajectories,) * num_trajectories,
        num_media_tokens=0,
        num_prompt_tokens=prompt.num_tokens,
        num_tokens=sum(tokens_by_version.values()),
        num_truncated=0,
        tokens_by_version=tokens_by_version,
        media_keys=(),
        num_media_bytes=0,
        num_bytes=0,
    )
