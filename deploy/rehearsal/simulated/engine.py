"""Simulated engine, its decoder and what it observes."""

from __future__ import annotations

import asyncio
import heapq
import math
import weakref
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mobula.cluster.errors import WorkerDiedError
from mobula.cluster.records.trajectory import Generated, GroupSummary, Prompt
from mobula.cluster.roles import PromptScores, SamplingSettings
from mobula.cluster.runtime.vitals import Vitals
from mobula.cluster.weight_sync.manifest import Manifest
from mobula.cluster.weight_sync.transport import Rendezvous
from mobula.deploy.rehearsal.simulated.machine import Cores, CpuMeter, ResponseLengths
from mobula.deploy.rehearsal.speeds import Speeds

_EPSILON = 1e-6  # engine steps that sums of floats may be off by
_EPSILON_S = 1e-9  # a shorter time is no time: a clock of large values cannot advance by it


@dataclass(frozen=True)
class DecodeSpeed:
    """Seconds of one engine step, which gives one token to each response of the batch:
    `step_s + sequence_s * responses`. A prompt's tokens are computed before its first response starts, and stop all
    others meanwhile."""

    step_s: float
    sequence_s: float = 0.0
    prefill_tokens_per_s: float = math.inf
    prompt_s: float = 0.0  # more for each response, whatever its length

    def of(self, num_responses: int) -> float:
        return self.step_s + self.sequence_s * num_responses


@dataclass(eq=False)
class _Group:
    """Siblings that are decoded together; `spans` in engine steps, one for each response that has started."""

    lengths: Sequence[int]
    prompt_tokens: int
    done: asyncio.Future[None]
    spans: dict[int, tuple[float, float]] = field(default_factory=dict)
    num_left: int = 0


class Decoder:
    """Decodes up to `num_slots` responses at a time; the others wait in order of arrival.

    It counts engine steps: a response of n tokens ends n steps after its start, whatever a step takes. Steps stand
    still while it is paused and before its first weights.
    """

    def __init__(self, speed: DecodeSpeed, *, num_slots: int, cores: Cores | None = None) -> None:
        self.speed = speed
        self.slow_down = 1.0  # factor on all seconds
        self.busy_s = 0.0  # seconds with a response in the batch
        self.busy_slot_s = 0.0  # the same, summed over responses
        self.num_tokens = 0  # of ended responses
        self._num_slots = num_slots
        self.cores = cores or Cores()
        self.cores.add(self)
        self._loop = asyncio.get_running_loop()
        self._active: list[tuple[float, int, int, _Group]] = []  # heap: (last step, number, sibling, group)
        self._queue: deque[tuple[int, _Group]] = deque()
        self._numbers = count()
        self._step = 0.0
        self._stall_s = 0.0  # of prompts that are computed before the next step
        self._at_s = self._loop.time()
        self._version_starts: list[tuple[float, int]] = []  # (engine step, version)
        self._is_paused = True
        self._is_counted = False  # as a computing thread of the cores
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_responses(self) -> int:
        return len(self._active) + len(self._queue)

    def pause(self) -> None:
        self.settle()
        self._is_paused = True
        self._follow()

    def resume(self, version: int) -> None:
        """Continues each response at its last token, with the weights of `version`."""
        self.settle()
        self._is_paused = False
        self._version_starts.append((self._step, version))
        self._follow()

    async def decode(self, lengths: Sequence[int], prompt_tokens: int) -> Counter[int]:
        group = _Group(lengths, prompt_tokens, self._loop.create_future(), num_left=len(lengths))
        self.settle()
        self._queue.extend((sibling, group) for sibling in range(len(lengths)))
        self._fill()
        self._follow()
        try:
            await group.done
        except asyncio.CancelledError:
            self.settle()
            self._queue = deque(entry for entry in self._queue if entry[-1] is not group)
            self._active = [entry for entry in self._active if entry[-1] is not group]
            heapq.heapify(self._active)
            self._fill()
            self._follow()
            raise
        return self._tokens_by_version(group)

    def fail(self, error: Exception) -> None:
        self.settle()
        groups = {entry[3]: None for entry in self._active} | {entry[1]: None for entry in self._queue}
        self._active.clear()
        self._queue.clear()
        self._is_paused = True
        self._follow()
        for group in groups:
            if not group.done.done():
                group.done.set_exception(error)

    def settle(self) -> None:
        """Adds the progress up to now."""
        now = self._loop.time()
        passed_s, self._at_s = now - self._at_s, now
        if self._is_paused or not self._active:
            return
        self.busy_s += passed_s
        self.busy_slot_s += passed_s * len(self._active)
        stalled_s = min(passed_s, self._stall_s)
        self._stall_s = 0.0 if self._stall_s - stalled_s < _EPSILON_S else self._stall_s - stalled_s
        self._step += (passed_s - stalled_s) / self._step_s()
        while self._active and self._active[0][0] <= self._step + max(_EPSILON, _EPSILON_S / self._step_s()):
            _, _, sibling, group = heapq.heappop(self._active)
            self.num_tokens += group.lengths[sibling]
            group.num_left -= 1
            if group.num_left == 0 and not group.done.done():
                group.done.set_result(None)
            self._fill()

    def replan(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._active and not self._is_paused:
            delay_s = self._stall_s + max(0.0, self._active[0][0] - self._step) * self._step_s()
            self._timer = self._loop.call_later(delay_s, self._tick)
        elif self._is_counted:  # other work on the cores settled this one, and the last response had ended
            self._timer = self._loop.call_later(0.0, self._tick)

    def _tick(self) -> None:
        self.settle()
        self._follow()

    def _follow(self) -> None:
        """Counts the engine as a computing thread, or no more, and plans the next event."""
        is_computing = bool(self._active) and not self._is_paused
        if is_computing != self._is_counted:
            self._is_counted = is_computing
            self.cores.occupy(1.0 if is_computing else -1.0)
        self.replan()

    def _step_s(self) -> float:
        return self.speed.of(len(self._active)) * self.slow_down / self.cores.speed

    def _fill(self) -> None:
        while self._queue and len(self._active) < self._num_slots:
            sibling, group = self._queue.popleft()
            if not group.spans:  # siblings share the prompt
                self._stall_s += group.prompt_tokens / self.speed.prefill_tokens_per_s * self.slow_down
            self._stall_s += self.speed.prompt_s * self.slow_down
            span = (self._step, self._step + group.lengths[sibling])
            group.spans[sibling] = span
            heapq.heappush(self._active, (span[1], next(self._numbers), sibling, group))

    def _tokens_by_version(self, group: _Group) -> Counter[int]:
        starts = [start for start, _ in self._version_starts]
        tokens = Counter[int]()
        for start, end in group.spans.values():
            first = bisect_right(starts, start + _EPSILON) - 1
            last = bisect_right(starts, end - _EPSILON) - 1
            bounds = [0, *(round(step - start) for step in starts[first + 1 : last + 1]), round(end - start)]
            for index, (begin, stop) in enumerate(pairwise(bounds), start=first):
                if stop > begin:
                    tokens[self._version_starts[index][1]] += stop - begin
        return tokens


class StoreLedger:
    """Counts the bytes of an object from `hold` until Python frees it, as the object store counts references."""

    def __init__(self) -> None:
        self.used: Counter[str] = Counter()  # node -> bytes
        self.peak: Counter[str] = Counter()
        self._held: set[int] = set()  # ids of objects

    def hold(self, thing: Any, node_id: str, num_bytes: int) -> None:
        if id(thing) in self._held:
            return
        self._held.add(id(thing))
        self.used[node_id] += num_bytes
        self.peak[node_id] = max(self.peak[node_id], self.used[node_id])
        weakref.finalize(thing, self._free, id(thing), node_id, num_bytes).atexit = False

    def _free(self, held: int, node_id: str, num_bytes: int) -> None:
        self._held.discard(held)
        self.used[node_id] -= num_bytes


class Observed:
    def __init__(self, driver_node: str) -> None:
        self.driver_node = driver_node
        self.cpu = CpuMeter()
        self.store = StoreLedger()
        self._decoders: list[Decoder] = []  # also of lost engines

    def add(self, decoder: Decoder) -> None:
        self._decoders.append(decoder)

    def busy_s(self) -> float:
        """Seconds in which engines decode, summed over engines."""
        for decoder in self._decoders:
            decoder.settle()
        return sum(decoder.busy_s for decoder in self._decoders)

    def num_tokens(self) -> int:
        return sum(decoder.num_tokens for decoder in self._decoders)


TOKEN_BYTES = 9  # of a sampled token in the object store: id, log-prob and mask
PROMPT_TOKEN_BYTES = 8  # of a prompt's token, in both of its sequences


@dataclass(frozen=True)
class SimulatedGroup:
    """Stands for the reference to a group: its prompt, and the node that holds its bytes."""

    prompt: Prompt
    node_id: str
    num_siblings: int


@dataclass(eq=False)
class SimulatedEngine:
    """Implements `mobula.cluster.rollout.rollout_pool.Engine` with a `Decoder`."""

    name: str
    node_id: str
    decoder: Decoder
    lengths: ResponseLengths
    speeds: Speeds
    push_s: float  # in which it receives weights and does not decode
    observed: Observed
    _version: int = 0
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)  # set, and replaced, with each version
    _death: Exception | None = None

    def __post_init__(self) -> None:
        self.observed.add(self.decoder)

    async def start(self) -> None:
        await asyncio.sleep(self.speeds.start_s)
        self._check_alive()
        self.decoder.resume(self._version)

    async def generate(self, prompt: Prompt, settings: SamplingSettings) -> Generated:
        """Samples a group; first waits for the push of `settings.min_version`."""
        while self._version < settings.min_version:
            self._check_alive()
            await self._arrived.wait()
        self._check_alive()
        with self.observed.cpu:
            lengths = self.lengths.of(prompt.prompt_id, settings.num_samples).tolist()
            decoding = self.decoder.decode(lengths, prompt.num_tokens)
        tokens = await decoding
        if self.speeds.wait_s:
            await asyncio.sleep(self.speeds.wait_s)
        with self.observed.cpu:
            summary = summary_of(prompt, tokens, lengths, settings.max_tokens)
            group = SimulatedGroup(prompt, self.node_id, summary.num_trajectories)
            self.observed.store.hold(group, self.node_id, summary.num_bytes)
            for handle in prompt.media:
                self.observed.store.hold(handle, self.observed.driver_node, handle.num_bytes)
        return Generated(group, summary)

    def begin_sample(self, prompt: Prompt, settings: SamplingSettings) -> Future[Any]:
        return Future()

    async def score_prompt(self, prompt: Prompt, adapter: str | None, num_top: int) -> PromptScores:
        raise ValueError("a rehearsed engine computes no log-probs of prompts")

    async def serve(self, adapter: str, folder: Path) -> None:
        raise ValueError("a rehearsed engine serves no adapters")

    async def withdraw(self, adapter: str) -> None:
        raise ValueError("a rehearsed engine serves no adapters")

    async def is_alive(self) -> Vitals | None:
        self._check_alive()
        return None

    async def probe(self) -> None:
        self._check_alive()

    async def close(self) -> None:
        self.lose(WorkerDiedError(f"{self.name} is ended"))

    def lose(self, error: Exception) -> None:
        """Ends the process: every call fails with `error` from now on."""
        if self._death is None:
            self._death = error
            self.decoder.fail(error)
            self._arrived.set()

    async def sleep(self) -> None:
        self._check_alive()
        self.decoder.pause()

    async def wake_up(self, tag: str) -> None:
        self._check_alive()
        if tag == "kv_cache":
            self.decoder.resume(self._version)

    async def check_manifest(self, manifest: Manifest) -> None:
        self._check_alive()

    async def join_transfer(self, rendezvous: Rendezvous, rank: int) -> None:
        self._check_alive()

    async def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> int:
        self.decoder.pause()
        await self._receive(version)
        return version

    async def load_weights(self, manifest: Manifest, bucket_bytes: int, buckets: Sequence[Any], version: int) -> None:
        self.decoder.pause()
        await self._receive(version)

    async def weight_version(self) -> int:
        self._check_alive()
        return self._version

    async def prompt_logprobs(self, prompt: Prompt) -> np.ndarray:
        """Returns float32 [P - 1]: 0, as simulated learner ranks do."""
        self._check_alive()
        return np.zeros(max(0, prompt.num_tokens - 1), dtype=np.float32)

    async def _receive(self, version: int) -> None:
        await asyncio.sleep(self.push_s)
        await self.decoder.cores.compute(self.speeds.settle_s)
        self._serve(version)

    def _serve(self, version: int) -> None:
        self._check_alive()
        self._version = version
        self.decoder.resume(version)
        self._arrived.set()
        self._arrived = asyncio.Event()

    def _check_alive(self) -> None:
        if self._death is not None:
            raise self._death


def summary_of(
    prompt: Prompt, tokens_by_version: Mapping[int, int], lengths: Sequence[int], max_tokens: int
) -> GroupSummary:
    num_tokens = sum(lengths)
    return GroupSummary(
        group_id=prompt.prompt_id,
        sample_id=prompt.sample_id,
        num_trajectories=len(lengths),
        num_steps=tuple(lengths),
        num_prompt_tokens=prompt.num_tokens,
        num_media_tokens=sum(span.end - span.start for span in prompt.media_spans),
        num_tokens=num_tokens,
        num_truncated=Counter(length >= max_tokens for length in lengths)[True],
        tokens_by_version=dict(tokens_by_version),
        media_keys=tuple(handle.key for handle in prompt.media),
        num_media_bytes=sum(handle.num_bytes for handle in prompt.media),
        num_bytes=TOKEN_BYTES * num_tokens + PROMPT_TOKEN_BYTES * prompt.num_tokens,
    )
