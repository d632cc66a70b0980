"""Decoder: the continuous batching of one engine in virtual time."""

from __future__ import annotations

import asyncio
import heapq
import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise

from mobula.deploy.rehearsal.simulated.cores import Cores

_EPSILON = 1e-6  # engine steps that sums of floats may be off by
_EPSILON_S = 1e-9  # a shorter time is no time: a clock of large values cannot advance by it


@dataclass(frozen=True)
class DecodeSpeed:
    """Seconds of one engine step, which gives one token to each response of the batch:
    `step_s + sequence_s * responses`. A prompt's tokens are computed before its first response starts, and stop all
    others meanwhile.
    """

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
        """Responses in the batch and in the queue."""
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
        """Decodes a group and returns the tokens of all siblings by version."""
        group = _Group(lengths, prompt_tokens, self._loop.create_future(), num_left=len(lengths))
        self.settle()
        self._queue.extend((sibling, group) for sibling in range(len(lengths)))
        self._fill()
        self._follow()
        try:
            await group.done
        except asyncio.CancelledError:
            self._drop(group)
            raise
        return self._tokens_by_version(group)

    def fail(self, error: Exception) -> None:
        """Ends all groups with an error."""
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
        self._end_due()

    def replan(self) -> None:
        """Sets the timer of the next response that ends."""
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

    def _end_due(self) -> None:
        while self._active and self._active[0][0] <= self._step + max(_EPSILON, _EPSILON_S / self._step_s()):
            _, _, sibling, group = heapq.heappop(self._active)
            self.num_tokens += group.lengths[sibling]
            group.num_left -= 1
            if group.num_left == 0 and not group.done.done():
                group.done.set_result(None)
            self._fill()

    def _fill(self) -> None:
        while self._queue and len(self._active) < self._num_slots:
            sibling, group = self._queue.popleft()
            if not group.spans:  # siblings share the prompt
                self._stall_s += group.prompt_tokens / self.speed.prefill_tokens_per_s * self.slow_down
            self._stall_s += self.speed.prompt_s * self.slow_down
            span = (self._step, self._step + group.lengths[sibling])
            group.spans[sibling] = span
            heapq.heappush(self._active, (span[1], next(self._numbers), sibling, group))

    def _drop(self, group: _Group) -> None:
        """Removes a cancelled group."""
        self.settle()
        self._queue = deque(entry for entry in self._queue if entry[-1] is not group)
        self._active = [entry for entry in self._active if entry[-1] is not group]
        heapq.heapify(self._active)
        self._fill()
        self._follow()

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
