"""GpuLease: engines and learner take turns on the devices that they share.

    HANDOVER --generate--> GENERATING --train--> TRAINING --hand_over--> HANDOVER

| phase | engines | learner |
|---|---|---|
| HANDOVER, until the push has arrived | weights awake, which the push replaces; no KV cache | policy on the device |
| HANDOVER, from then on | awake | on the host |
| GENERATING | awake | on the host |
| TRAINING | asleep | on the device |

So the device never holds the KV cache together with the policy or the optimizer. Nothing is sampled outside
GENERATING: there the engines' weights are those of the last push, everywhere else they may be dead. No engine starts in
TRAINING: it takes its whole memory at once, and the learner has it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from enum import StrEnum
from typing import Any, Protocol

from mobula.cluster.records.trajectory import Generated, Prompt
from mobula.cluster.roles import Rollouts, SamplingSettings, Weights
from mobula.cluster.runtime.concurrency import outcomes

_logger = logging.getLogger(__name__)


class Phase(StrEnum):
    """Whose turn it is."""

    HANDOVER = "handover"
    GENERATING = "generating"
    TRAINING = "training"


NEXT = {Phase.HANDOVER: Phase.GENERATING, Phase.GENERATING: Phase.TRAINING, Phase.TRAINING: Phase.HANDOVER}


class Turns:
    """The phases as a state machine: pure accounting, one change at a time, and only while nothing is sampled."""

    def __init__(self) -> None:
        self.phase = Phase.HANDOVER
        self.num_sampling = 0
        self.num_starting = 0  # engines
        self.is_changing = False

    @property
    def may_sample(self) -> bool:
        return self.phase is Phase.GENERATING and not self.is_changing

    @property
    def may_start(self) -> bool:
        """Whether an engine may start: the learner does not train, and is not about to."""
        return self.phase is not Phase.TRAINING and not (self.is_changing and self.phase is Phase.GENERATING)

    @property
    def may_change(self) -> bool:
        """Whether the change that has begun may be made. A push leaves room for an engine that starts, a step none."""
        return self.num_sampling == 0 and not (self.phase is Phase.GENERATING and self.num_starting)

    def sample(self) -> None:
        """One more request is under way."""
        assert self.may_sample, f"a request in phase {self.phase}: the engines' weights may be dead"
        self.num_sampling += 1

    def sampled(self) -> None:
        self.num_sampling -= 1

    def start(self) -> None:
        """One more engine starts."""
        assert self.may_start, f"an engine that starts in phase {self.phase}: the learner has its memory"
        self.num_starting += 1

    def started(self) -> None:
        self.num_starting -= 1

    def begin(self, phase: Phase) -> None:
        """No sampling may begin until `end`; the change itself waits until it may be made."""
        assert not self.is_changing, f"{phase} begins while another change from {self.phase} is under way"
        assert NEXT[self.phase] is phase, f"{phase} does not follow {self.phase}"
        self.is_changing = True

    def end(self, phase: Phase) -> None:
        assert self.num_sampling == 0, f"{self.num_sampling} requests are under way as {phase} begins"
        assert self.may_change, f"{self.num_starting} engines start as {phase} begins"
        self.phase, self.is_changing = phase, False


class SleepingEngine(Protocol):
    """One rollout actor whose memory can be given back."""

    name: str

    async def sleep(self) -> None: ...

    async def wake_up(self, tag: str) -> None:
        """`weights` or `kv_cache`; it can sample once both are awake."""
        ...


class Engines(Protocol):
    """The engines that serve now."""

    def receivers(self) -> Sequence[Any]:
        """Each a `SleepingEngine`."""
        ...

    def lose(self, receiver: Any, error: Exception) -> None: ...


class MovableLearner(Protocol):
    """A learner group that can leave its devices."""

    async def offload(self, part: str) -> None:
        """Move `policy` or `optimizer` to host memory."""
        ...

    async def onload(self) -> None:
        """Move everything back."""
        ...


class GpuLease:
    """Puts engines to sleep and moves the learner as their turns come; an engine that cannot follow is lost."""

    def __init__(self, engines: Engines, learner: MovableLearner) -> None:
        self._engines = engines
        self._learner = learner
        self._turns = Turns()
        self._changed = asyncio.Condition()

    @property
    def phase(self) -> Phase:
        return self._turns.phase

    @asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        """Hold the devices for one request; waits for the engines' turn."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._turns.may_sample)
            self._turns.sample()
        try:
            yield
        finally:
            async with self._changed:
                self._turns.sampled()
                self._changed.notify_all()

    @asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        """Hold the devices while one engine starts and joins; waits while the learner trains."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._turns.may_start)
            self._turns.start()
        try:
            yield
        finally:
            async with self._changed:
                self._turns.started()
                self._changed.notify_all()

    async def begin(self) -> None:
        """The learner's turn before the first push, in which it loads a checkpoint, takes steps again or is warmed up:
        its memory is on the devices, and the engines have started."""
        assert self.phase is Phase.HANDOVER, f"a run that begins in phase {self.phase}"
        async with self._changed:
            await self._each(lambda engine: engine.sleep())
            self._turns.phase = Phase.TRAINING

    async def train(self) -> None:
        """The learner's turn, once no request is under way and no engine starts."""
        async with self._change(Phase.TRAINING):
            await self._each(lambda engine: engine.sleep())
            await self._learner.onload()

    async def hand_over(self) -> None:
        """Both hold their weights, so that a push can go from one to the other; the KV cache stays asleep."""
        if self.phase is Phase.HANDOVER:
            return  # an earlier push ended with an error
        async with self._change(Phase.HANDOVER):
            await self._learner.offload("optimizer")
            await self._each(lambda engine: engine.wake_up("weights"))

    async def arrived(self, version: int) -> None:
        """Called when the push of `version` has arrived: the learner makes room for the KV caches."""
        await self._learner.offload("optimizer")  # at the first push of a run it is still there
        await self._learner.offload("policy")
        await self._each(lambda engine: engine.wake_up("kv_cache"))

    async def generate(self) -> None:
        """The engines' turn; their weights are those of the push that has arrived."""
        async with self._change(Phase.GENERATING):
            pass  # `arrived` has moved everything

    @asynccontextmanager
    async def _change(self, phase: Phase) -> AsyncIterator[None]:
        async with self._changed:
            self._turns.begin(phase)
            await self._changed.wait_for(lambda: self._turns.may_change)
            # Under the lock: no request may begin while engines sleep or wake up.
            yield
            self._turns.end(phase)
            self._changed.notify_all()

    async def _each(self, call: Callable[[SleepingEngine], Coroutine[Any, Any, None]]) -> None:
        engines = self._engines.receivers()
        for engine, outcome in zip(engines, await outcomes(*(call(engine) for engine in engines)), strict=True):
            if isinstance(outcome, Exception):
                self._engines.lose(engine, outcome)


class LeasedRollouts:
    """Rollouts that sample in the engines' turn."""

    def __init__(self, rollouts: Rollouts, lease: GpuLease) -> None:
        self._rollouts = rollouts
        self._lease = lease

    async def generate(self, prompt: Prompt, settings: SamplingSettings) -> Generated:
        async with self._lease.sampling():
            return await self._rollouts.generate(prompt, settings)


class LeasedWeights:
    """Pushes between the learner's turn and the engines'."""

    def __init__(self, weights: Weights, lease: GpuLease) -> None:
        self._weights = weights
        self._lease = lease

    def settling(self) -> AbstractAsyncContextManager[None]:
        return self._weights.settling()

    async def settled(self) -> None:
        await self._weights.settled()

    async def publish(self, version: int) -> int:
        await self._lease.hand_over()
        published = await self._weights.publish(version)
        await self._weights.settled()
        await self._lease.generate()
        return published
