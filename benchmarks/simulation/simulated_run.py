"""A whole run in virtual time: loop, dispatcher, gate, order and buffer as they are, everything around them
simulated."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache

import numpy as np

from mobula.cluster.controller import Controller
from mobula.cluster.records.trajectory import Generated, GroupOutcome, Prompt, Reward, ScoredGroup
from mobula.cluster.replay.buffer import ReplayBuffer
from mobula.cluster.roles import ReplayStats, SamplingSettings, UpdateReport
from mobula.cluster.rollout.dispatcher import AdmissionFilter, GroupObserver, RolloutDispatcher
from mobula.cluster.rollout.staleness import StalenessGate, StepOrder
from mobula.deploy.rehearsal.simulated.engine import Decoder, DecodeSpeed, summary_of
from mobula.deploy.rehearsal.simulated.machine import LognormalLengths, run_virtually

KEEP_ALL = AdmissionFilter(min_scored=1, drop_uniform=False, max_rejected_in_a_row=1)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The responses and steps of a workload, and the speed of the machines."""

    lengths: LognormalLengths
    num_siblings: int
    num_engines: int
    slots_per_engine: int  # responses that one engine decodes at a time
    tokens_per_s: float  # of one response, however many are decoded beside it
    prompts_per_step: int
    update_s: float
    push_s: float  # every engine stands still for it
    reference_s: float
    reward_s: float
    num_steps: int
    num_warmup_steps: int  # left out of all figures at the run's start, and as many at its end

    @property
    def num_slots(self) -> int:
        return self.num_engines * self.slots_per_engine

    @property
    def decoding_s(self) -> float:
        """Seconds a step while every slot decodes all the time."""
        num_prompts = self.num_steps * self.prompts_per_step
        num_tokens = _num_tokens(self.lengths, self.num_siblings, num_prompts) / self.num_steps
        return num_tokens / (self.num_slots * self.tokens_per_s)

    @property
    def ideal_step_s(self) -> float:
        """Seconds a step without any waiting: those of engines or learner, the larger of both."""
        return max(self.decoding_s, self.update_s + self.push_s)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Measurements of a run between its warm-up and its end."""

    step_s: float  # mean
    engine_idle_share: float  # of slot-seconds; pauses are idle too
    learner_idle_share: float  # neither updating nor pushing
    mean_age: float  # versions, over trained tokens
    max_age: int
    mean_tokens: float  # of a trained response
    trained: tuple[tuple[str, ...], ...]  # prompt ids of every step
    num_dropped: int  # groups, because they had got over-age
    dropped_tokens: float | None  # mean, of a dropped response


def simulate(
    workload: Workload,
    *,
    max_staleness: int,
    max_concurrent: int,
    order: type[StepOrder] = StepOrder,
) -> Outcome:
    """Run the workload once, from version 0 to its end."""
    return run_virtually(_simulate(workload, max_staleness, max_concurrent, order))


async def _simulate(workload: Workload, max_staleness: int, max_concurrent: int, order: type[StepOrder]) -> Outcome:
    engines = [Engine.of(workload) for _ in range(workload.num_engines)]
    learner = _Learner(workload.update_s)
    observer = _Observer(engines)
    replay = ReplayBuffer(clock=asyncio.get_running_loop().time)
    gate = StalenessGate(
        prompts_per_step=workload.prompts_per_step,
        max_staleness=max_staleness,
        max_concurrent=max_concurrent,
        total_steps=workload.num_steps,
    )
    dropped: list[GroupOutcome] = []
    dispatcher = _dispatcher(workload, gate, engines, replay, order(gate), dropped)
    controller = Controller(
        total_steps=workload.num_steps,
        groups_per_step=workload.prompts_per_step,
        checkpoints=_Nothing(),
        weights=_Push(workload.push_s, engines, dispatcher.advance),
        supervisor=_Nothing(),
        rollouts=dispatcher,
        replay=replay,
        reference=_Reference(workload.reference_s),
        learner=learner,
        evaluator=_Nothing(),
        metrics=observer,
        stop=_Nothing(),
    )
    await controller.run()
    return _outcome(workload, engines, learner.trained, observer, dropped)


def _dispatcher(
    workload: Workload,
    gate: StalenessGate,
    engines: Sequence[Engine],
    replay: ReplayBuffer,
    order: StepOrder[ScoredGroup],
    dropped: list[GroupOutcome],
) -> RolloutDispatcher:
    num_siblings = workload.num_siblings
    return RolloutDispatcher(
        prompts=NumberedPrompts(),
        gate=gate,
        rollouts=LeastLoaded(engines),
        rewards=DelayedRewards(workload.reward_s, num_siblings),
        replay=replay,
        settings=SamplingSettings(num_siblings, 1.0, workload.lengths.max_tokens, workload.lengths.seed),
        admission_filter=KEEP_ALL,
        order=order,
        group_observers=[_Dropped(dropped)],
    )


def _outcome(
    workload: Workload,
    engines: Sequence[Engine],
    trained: Sequence[Sequence[ScoredGroup]],
    observer: _Observer,
    dropped: Sequence[GroupOutcome],
) -> Outcome:
    first, last = workload.num_warmup_steps, workload.num_steps - workload.num_warmup_steps
    begin, end = observer.moments[first - 1], observer.moments[last - 1]
    seconds = end.loop_s - begin.loop_s
    busy_s = end.busy_slot_s - begin.busy_slot_s
    working_s = sum(phases["update"] + phases["weight_sync"] for phases in observer.phases[first:last])
    ages = _ages(trained, range(first, last))
    num_responses = (last - first) * workload.prompts_per_step * workload.num_siblings
    return Outcome(
        step_s=seconds / (last - first),
        engine_idle_share=1 - busy_s / (seconds * workload.num_slots),
        learner_idle_share=1 - working_s / seconds,
        mean_age=sum(age * num_tokens for age, num_tokens in ages.items()) / ages.total(),
        max_age=max(ages),
        mean_tokens=ages.total() / num_responses,
        trained=tuple(tuple(group.summary.group_id for group in groups) for groups in trained),
        num_dropped=len(dropped),
        dropped_tokens=_mean_tokens(dropped),
    )


class _Dropped(GroupObserver):
    def __init__(self, dropped: list[GroupOutcome]) -> None:
        self._dropped = dropped

    def rejected(self, outcome: GroupOutcome, reason: str) -> None:
        self._dropped.append(outcome)


def _mean_tokens(groups: Sequence[GroupOutcome]) -> float | None:
    num_responses = sum(group.num_responses for group in groups)
    return sum(group.num_tokens for group in groups) / num_responses if num_responses else None


def _ages(trained: Sequence[Sequence[ScoredGroup]], steps: range) -> Counter[int]:
    """Age in versions -> tokens; step s trains from version s."""
    ages = Counter[int]()
    for step in steps:
        for group in trained[step]:
            for version, num_tokens in group.summary.tokens_by_version.items():
                ages[step - version] += num_tokens
    return ages


@cache
def _num_tokens(lengths: LognormalLengths, num_siblings: int, num_prompts: int) -> int:
    return sum(int(lengths.of(str(index), num_siblings).sum()) for index in range(num_prompts))


class Engine:
    """Decodes up to `num_slots` responses at a time, each at `tokens_per_s`."""

    def __init__(self, lengths: LognormalLengths, *, num_slots: int, tokens_per_s: float) -> None:
        self.decoder = Decoder(DecodeSpeed(1 / tokens_per_s), num_slots=num_slots)
        self.num_in_flight = 0  # groups
        self._lengths = lengths

    @classmethod
    def of(cls, workload: Workload) -> Engine:
        return cls(workload.lengths, num_slots=workload.slots_per_engine, tokens_per_s=workload.tokens_per_s)

    async def generate(self, prompt: Prompt, settings: SamplingSettings) -> Generated:
        """One group, once its slowest sibling is done; its id stands for its bytes."""
        self.num_in_flight += 1
        try:
            lengths = self._lengths.of(prompt.prompt_id, settings.num_samples).tolist()
            tokens = await self.decoder.decode(lengths, 0)
        finally:
            self.num_in_flight -= 1
        return Generated(prompt.prompt_id, summary_of(prompt, tokens, lengths, settings.max_tokens))


class LeastLoaded:
    """Sends each prompt to the engine with the fewest groups in flight."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines

    async def generate(self, prompt: Prompt, settings: SamplingSettings) -> Generated:
        return await min(self._engines, key=lambda engine: engine.num_in_flight).generate(prompt, settings)


class NumberedPrompts:
    """An endless sequence of prompts whose ids are `prefix` and a number from 0 on."""

    def __init__(self, prefix: str = "") -> None:
        self.cursor = 0
        self._prefix = prefix

    def next(self) -> Prompt:
        ids = np.zeros(1, dtype=np.int32)
        prompt = Prompt(f"{self._prefix}{self.cursor}", str(self.cursor), "", ids, ids)
        self.cursor += 1
        return prompt

    def restore(self, cursor: int, pending: Sequence[str]) -> None:
        assert not pending, f"{len(pending)} prompts are pending: a simulated run is not resumed"
        self.cursor = cursor


class DelayedRewards:
    """The same reward for every sibling, after a while."""

    def __init__(self, seconds: float, num_siblings: int) -> None:
        self._seconds = seconds
        self._rewards = (Reward(0.0),) * num_siblings

    async def score(self, group: object, group_id: str) -> Sequence[Reward]:
        await asyncio.sleep(self._seconds)
        return self._rewards


class _Reference:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def score(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        await asyncio.sleep(self._seconds)
        return list(groups)


class _Learner:
    """An update takes its time; what was trained on is kept, step by step."""

    def __init__(self, seconds: float) -> None:
        self.trained: list[Sequence[ScoredGroup]] = []
        self._seconds = seconds

    async def update(self, groups: Sequence[ScoredGroup]) -> UpdateReport:
        await asyncio.sleep(self._seconds)
        self.trained.append(groups)
        return UpdateReport(len(self.trained), {})


class _Push:
    """Every engine stands still while the weights travel."""

    def __init__(self, seconds: float, engines: Sequence[Engine], advance: Callable[[int], None]) -> None:
        self._seconds = seconds
        self._engines = engines
        self._advance = advance

    def settling(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def settled(self) -> None:
        """A push waits for every engine."""

    async def publish(self, version: int) -> int:
        for engine in self._engines:
            engine.decoder.pause()
        await asyncio.sleep(self._seconds)
        for engine in self._engines:
            engine.decoder.resume(version)
        self._advance(version)
        return version


@dataclass(frozen=True)
class _Moment:
    """All clocks at the end of a step."""

    loop_s: float
    busy_slot_s: float


class _Observer:
    """The time of each step by phase, and the clocks at its end."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.moments: list[_Moment] = []
        self.phases: list[Counter[str]] = []  # phase -> seconds
        self._engines = engines

    @contextmanager
    def step(self, step: int) -> Iterator[_Observer]:
        self.phases.append(Counter())
        yield self
        now = asyncio.get_running_loop().time()
        for engine in self._engines:
            engine.decoder.settle()
        self.moments.append(_Moment(now, sum(engine.decoder.busy_slot_s for engine in self._engines)))

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        started = asyncio.get_running_loop().time()
        yield
        self.phases[-1][phase] += asyncio.get_running_loop().time() - started

    def record(self, groups: Sequence[ScoredGroup], update: UpdateReport, replay: ReplayStats) -> None:
        """The learner keeps the groups."""


class _Nothing:
    """Checkpoints, evaluation, supervision and stops of a run that has none."""

    async def resume(self) -> int:
        return 0

    async def maybe_save(self, version: int) -> None: ...

    async def ensure_saved(self, version: int) -> None: ...

    async def maybe_run(self, version: int) -> None: ...

    async def finish(self) -> None: ...

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def evaluating(self) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def accepting_requests(self) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def interruptible(self) -> AsyncIterator[None]:
        yield
