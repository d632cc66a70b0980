"""GpuLease: gives engines and learner time slices on shared GPUs.

    HANDOVER --generate--> GENERATING --train--> TRAINING --hand_over--> HANDOVER

| phase | engines | learner |
|---|---|---|
| HANDOVER, until the push has arrived | old weights awake; no KV cache | policy on the device |
| HANDOVER, from then on | awake | on the host |
| GENERATING | awake | on the host |
| TRAINING | asleep | on the device |

So the device never holds the KV cache together with the policy or the optimizer. Nothing is sampled outside
GENERATING: only there the engines hold the weights of the last push. No engine starts in TRAINING: an engine allocates
its whole memory at start-up, and the learner uses this memory.
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
    """Which side uses the devices."""

    HANDOVER = "handover"
    GENERATING = "generating"
    TRAINING = "training"


NEXT = {Phase.HANDOVER: Phase.GENERATING, Phase.GENERATING: Phase.TRAINING, Phase.TRAINING: Phase.HANDOVER}


class LeaseState:
    """State machine of the phases. One change is made at a time, and only while no request is in flight."""

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
        """Whether an engine may start: the learner neither trains nor waits to train."""
        return self.phase is not Phase.TRAINING and not (self.is_changing and self.phase is Phase.GENERATING)

    @property
    def may_change(self) -> bool:
        """Whether the pending change may be made. Engines have the memory to start during a push, not during a step."""
        return self.num_sampling == 0 and not (self.phase is Phase.GENERATING and self.num_starting)

    def sample(self) -> None:
        assert self.may_sample, f"a request in phase {self.phase}: the engines' weights may be gone"
        self.num_sampling += 1

    def sampled(self) -> None:
        self.num_sampling -= 1

    def start(self) -> None:
        assert self.may_start, f"an engine that starts in phase {self.phase}: the learner uses the memory"
        self.num_starting += 1

    def started(self) -> None:
        self.num_starting -= 1

    def begin(self, phase: Phase) -> None:
        """Stops new requests until `end`. The caller waits for `may_change` before it calls `end`."""
        assert not self.is_changing, f"{phase} begins during another change from {self.phase}"
        assert NEXT[self.phase] is phase, f"{phase} does not follow {self.phase}"
        self.is_changing = True

    def end(self, phase: Phase) -> None:
        assert self.num_sampling == 0, f"{self.num_sampling} requests are in flight as {phase} begins"
        assert self.may_change, f"{self.num_starting} engines start as {phase} begins"
        self.phase, self.is_changing = phase, False


class SleepingEngine(Protocol):
    """A rollout actor that can free device memory."""

    name: str

    async def sleep(self) -> None: ...

    async def wake_up(self, tag: str) -> None:
        """Restores `weights` or `kv_cache` (`tag`). The engine can sample once both are awake."""


class Engines(Protocol):
    """The serving engines."""

    def receivers(self) -> Sequence[Any]:
        """Returns the serving engines, each a `SleepingEngine`."""

    def lose(self, receiver: Any, error: Exception) -> None: ...


class MovableLearner(Protocol):
    """A learner group that can be offloaded to host memory."""

    async def offload(self, part: str) -> None:
        """Moves `policy` or `optimizer` (`part`) to host memory."""

    async def onload(self) -> None:
        """Moves both back to the devices."""


class GpuLease:
    """Suspends engines and offloads the learner at phase changes. An engine that fails to sleep or wake is lost.

    With `sends_adapters` the policy is offloaded before engines wake up: adapters are pushed from host memory, and the
    device never holds the learner's base together with an engine.
    """

    def __init__(self, engines: Engines, learner: MovableLearner, *, sends_adapters: bool = False) -> None:
        self._engines = engines
        self._learner = learner
        self._sends_adapters = sends_adapters
        self._state = LeaseState()
        self._changed = asyncio.Condition()

    @property
    def phase(self) -> Phase:
        return self._state.phase

    def sampling(self) -> AbstractAsyncContextManager[None]:
        """Holds the devices for one request; waits for the phase GENERATING."""
        return self._held(lambda: self._state.may_sample, self._state.sample, self._state.sampled)

    def starting(self) -> AbstractAsyncContextManager[None]:
        """Holds the devices while one engine starts and joins; waits while the learner trains."""
        return self._held(lambda: self._state.may_start, self._state.start, self._state.started)

    @asynccontextmanager
    async def _held(
        self, may_begin: Callable[[], bool], begin: Callable[[], None], end: Callable[[], None]
    ) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(may_begin)
            begin()
        try:
            yield
        finally:
            async with self._changed:
                end()
                self._changed.notify_all()

    async def begin(self) -> None:
        """Enters TRAINING before the first push, for a resume or the warm start. The engines have started, and the
        learner is on the devices."""
        assert self.phase is Phase.HANDOVER, f"a run that begins in phase {self.phase}"
        async with self._changed:
            await self._each(lambda engine: engine.sleep())
            self._state.phase = Phase.TRAINING

    async def train(self) -> None:
        """Enters TRAINING, once no request is in flight and no engine starts."""
        async with self._change(Phase.TRAINING):
            await self._each(lambda engine: engine.sleep())
            await self._learner.onload()

    async def hand_over(self) -> None:
        """Enters HANDOVER: learner and engines hold their weights for the push; the KV cache stays asleep."""
        if self.phase is Phase.HANDOVER:
            return  # an earlier push ended with an error
        async with self._change(Phase.HANDOVER):
            await self._learner.offload("optimizer")
            if self._sends_adapters:
                await self._learner.offload("policy")
            await self._each(lambda engine: engine.wake_up("weights"))

    async def arrived(self, version: int) -> None:
        """Called when the push of `version` has arrived: offloads the learner to make room for the KV caches."""
        await self._learner.offload("optimizer")  # still on the device at the first push of a run
        await self._learner.offload("policy")
        await self._each(lambda engine: engine.wake_up("kv_cache"))

    async def generate(self) -> None:
        """Enters GENERATING, after the push has arrived."""
        async with self._change(Phase.GENERATING):
            pass  # `arrived` has offloaded the learner

    @asynccontextmanager
    async def _change(self, phase: Phase) -> AsyncIterator[None]:
        async with self._changed:
            self._state.begin(phase)
            await self._changed.wait_for(lambda: self._state.may_change)
            # Under the lock: no request may begin while engines sleep or wake up.
            yield
            self._state.end(phase)
            self._changed.notify_all()

    async def _each(self, call: Callable[[SleepingEngine], Coroutine[Any, Any, None]]) -> None:
        engines = self._engines.receivers()
        for engine, outcome in zip(engines, await outcomes(*(call(engine) for engine in engines)), strict=True):
            if isinstance(outcome, Exception):
                self._engines.lose(engine, outcome)


class LeasedRollouts:
    """Rollouts that sample only in the phase GENERATING."""

    def __init__(self, rollouts: Rollouts, lease: GpuLease) -> None:
        self._rollouts = rollouts
        self._lease = lease

    async def generate(self, prompt: Prompt, settings: SamplingSettings) -> Generated:
        async with self._lease.sampling():
            return await self._rollouts.generate(prompt, settings)


class LeasedWeights:
    """Pushes weights in the phase HANDOVER."""

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
