"""Fakes of every role, with delays and faults to inject: the loop's real parts run on them in milliseconds."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.trajectory import (
    FinishReason,
    Generated,
    Prompt,
    Response,
    Reward,
    ScoredGroup,
    Trajectory,
    TrajectoryGroup,
    WeightSpan,
)
from mobula.cluster.recovery.stop_request import StopRequest
from mobula.cluster.roles import ReplayStats, SamplingSettings, UpdateReport
from mobula.cluster.workers.status import Progress, RestartPolicy

NUM_SAMPLES = 2

NUM_TOKENS = 3

SETTINGS = SamplingSettings(num_samples=NUM_SAMPLES, temperature=1.0, max_tokens=NUM_TOKENS, seed=7)


class Code:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self._mark), "w")


def by_value(value: Any) -> Any:
    """In the place of an object store."""
    return value


def make_prompt(prompt_id: str) -> Prompt:
    ids = np.array([1, 2, 3], dtype=np.int32)
    return Prompt(prompt_id, prompt_id.rpartition("/")[2], f"question {prompt_id}", ids, ids)


def make_trajectory(trajectory_id: str, versions: Sequence[int]) -> Trajectory:
    """One token a version."""
    num = len(versions)
    return Trajectory(
        trajectory_id=trajectory_id,
        actions=TokenActions(np.arange(num, dtype=np.int32)),
        behavior_logprobs=np.full(num, -0.5, dtype=np.float32),
        action_mask=np.ones(num, dtype=bool),
        weight_spans=tuple(WeightSpan(version, i, i + 1) for i, version in enumerate(versions)),
        finish_reason=FinishReason.STOP,
        response=Response(f"answer of {trajectory_id}", num, is_truncated=False),
    )


def make_group(prompt: Prompt, versions: Sequence[int] = (0,) * NUM_TOKENS) -> TrajectoryGroup:
    ids = [f"{prompt.prompt_id}#{i}" for i in range(NUM_SAMPLES)]
    return TrajectoryGroup(prompt, tuple(make_trajectory(i, versions) for i in ids))


def make_scored(prompt_id: str, rewards: Sequence[float] = (0.0, 1.0)) -> ScoredGroup:
    group = make_group(make_prompt(prompt_id))
    return ScoredGroup(group.summary(), group, tuple(Reward(value, {"accuracy": value}) for value in rewards))


class FakePrompts:
    """An endless sequence "0/0/s0", "0/1/s1", ...; each comes when it is asked for."""

    def __init__(self, epoch_size: int = 1000) -> None:
        self.cursor = 0
        self._epoch_size = epoch_size
        self._pending: list[str] = []

    def id_at(self, index: int) -> str:
        epoch, position = divmod(index, self._epoch_size)
        return f"{epoch}/{position}/s{position}"

    def index_of(self, prompt_id: str) -> int:
        epoch, position, _ = prompt_id.split("/")
        return int(epoch) * self._epoch_size + int(position)

    def prompt_at(self, index: int) -> Prompt:
        return make_prompt(self.id_at(index))

    def is_open(self, index: int) -> bool:
        return True

    def next(self) -> Prompt:
        if self._pending:
            prompt_id = self._pending.pop(0)
        else:
            prompt_id = self.id_at(self.cursor)
            self.cursor += 1
        return make_prompt(prompt_id)

    def restore(self, cursor: int, pending: Sequence[str]) -> None:
        self.cursor = cursor
        self._pending = list(pending)


class FakeRollouts:
    """Samples token by token with the weights of the moment.

    `pauses(prompt_id)` is how often the event loop turns before each token; `fault(prompt_id, attempt)` returns an
    error to raise, or None; attempts count from 0.
    """

    def __init__(
        self,
        pauses: Callable[[str], int] = lambda prompt_id: 0,
        fault: Callable[[str, int], Exception | None] = lambda prompt_id, attempt: None,
    ) -> None:
        self.version = 0
        self.num_in_flight = 0
        self.max_in_flight = 0
        self.attempts: Counter[str] = Counter()
        self.settings: dict[str, SamplingSettings] = {}
        self._pauses = pauses
        self._fault = fault

    async def generate(self, prompt: Prompt, settings: SamplingSettings) -> Generated:
        self.num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        try:
            return await self._sample(prompt, settings)
        finally:
            self.num_in_flight -= 1

    async def _sample(self, prompt: Prompt, settings: SamplingSettings) -> Generated:
        attempt = self.attempts[prompt.prompt_id]
        self.attempts[prompt.prompt_id] += 1
        self.settings[prompt.prompt_id] = settings
        versions: list[int] = []
        while self.version < settings.min_version:
            await turns(1)
        for _ in range(NUM_TOKENS):
            await self._pause(prompt.prompt_id, versions)
            versions.append(self.version)
        error = self._fault(prompt.prompt_id, attempt)
        if error is not None:
            raise error
        group = make_group(prompt, versions)
        return Generated(group, group.summary())

    async def _pause(self, prompt_id: str, versions: Sequence[int]) -> None:
        """What comes before a token; `versions` are those of the tokens before it."""
        await turns(1 + self._pauses(prompt_id))


class FakeRewards:
    """`values(prompt_id)` gives one value a sibling, None where it cannot be scored."""

    def __init__(self, values: Callable[[str], Sequence[float | None]] = lambda prompt_id: (0.0, 1.0)) -> None:
        self._values = values

    async def score(self, group: TrajectoryGroup, group_id: str) -> list[Reward | None]:
        assert group_id == group.group_id
        await turns(1)
        values = self._values(group.group_id)
        return [None if value is None else Reward(value, {"accuracy": value}) for value in values]


class FakeReference:
    async def score(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        await turns(1)
        return [replace(g, reference_logprobs=[t.behavior_logprobs for t in g.group.trajectories]) for g in groups]


class FakeLearner:
    """Counts steps; `trained` holds (version it trained from, groups) of each step that this object took.

    `weights` is what it has learned from: the ids of every step since version 0, also across `save` and `load`.
    """

    def __init__(self, num_turns: int = 3) -> None:
        self.version = 0
        self.trained: list[tuple[int, list[ScoredGroup]]] = []
        self.weights: list[list[str]] = []
        self._num_turns = num_turns

    async def update(self, groups: Sequence[ScoredGroup]) -> UpdateReport:
        await turns(self._num_turns)
        self.trained.append((self.version, list(groups)))
        self.weights.append([group.summary.group_id for group in groups])
        self.version += 1
        return UpdateReport(self.version, {"loss": 0.0})

    async def save(self, folder: Path) -> None:
        for rank in range(2):
            state = {"version": self.version, "rank": rank, "weights": self.weights}
            (folder / f"rank{rank}.json").write_text(json.dumps(state))

    async def finish_save(self) -> bool:
        return True

    async def load(self, folder: Path) -> int:
        first, second = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
        assert {**first, "rank": 1} == second
        self.version, self.weights = first["version"], first["weights"]
        return self.version

    @property
    def prompt_ids(self) -> list[list[str]]:
        """Of each step."""
        return [[group.summary.group_id for group in groups] for _, groups in self.trained]


class FakeWeights:
    """Announces a version and moves every engine to it."""

    def __init__(self, rollouts: FakeRollouts) -> None:
        self.published: list[int] = []
        self._rollouts = rollouts
        self.on_announced: list[Callable[[int], None]] = []

    def settling(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def settled(self) -> None:
        """`publish` itself waits for every engine."""

    async def publish(self, version: int) -> int:
        for announce in self.on_announced:
            announce(version)
        await turns(2)
        self._rollouts.version = version
        await turns(1)
        self.published.append(version)
        return version


class FakeStep:
    def __init__(self) -> None:
        self.phases: list[str] = []
        self.replay: ReplayStats | None = None
        self.included: dict[str, float] = {}

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        self.phases.append(phase)
        yield

    def include(self, seconds: Mapping[str, float]) -> None:
        self.included = dict(seconds)

    def record(self, groups: Sequence[ScoredGroup], update: UpdateReport, replay: ReplayStats) -> None:
        self.replay = replay


@dataclass
class FakeMetrics:
    steps: dict[int, FakeStep] = field(default_factory=dict)

    @contextmanager
    def step(self, step: int) -> Iterator[FakeStep]:
        self.steps[step] = FakeStep()
        yield self.steps[step]


class FakeEvaluator:
    """`due` is called with each version that the loop offers."""

    def __init__(self, due: Callable[[int], None] = lambda version: None) -> None:
        self.offered: list[int] = []
        self._due = due

    @asynccontextmanager
    async def evaluating(self) -> AsyncIterator[None]:
        yield

    async def maybe_run(self, version: int) -> None:
        self.offered.append(version)
        self._due(version)

    async def finish(self) -> None: ...


def stop_request(deadline_s: float = 5.0) -> StopRequest:
    """Of a run whose progress no test looks at."""
    return StopRequest(deadline_s=deadline_s, progress=lambda: Progress(1, "update", 0.0))


class NoSupervisor:
    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        yield


async def turns(num: int) -> None:
    """Let the event loop turn `num` times."""
    for _ in range(num):
        await asyncio.sleep(0)


@dataclass(frozen=True)
class LocalReference:
    """What a call returns: its result, sooner or later."""

    task: asyncio.Future[Any]

    def future(self) -> asyncio.Future[Any]:
        return self.task


@dataclass(frozen=True)
class LocalMethod:
    """`handle.method`. As in Ray, several results are taken apart and a single one is left as it is."""

    function: Callable[..., Any]
    streams: list[LocalStream]  # of the handle
    num_returns: int | str = 1

    def options(self, *, num_returns: int | str = 1, concurrency_group: str = "") -> LocalMethod:
        """Here every call has a lane of its own."""
        return replace(self, num_returns=num_returns)

    def remote(self, *args: Any, **named: Any) -> Any:
        if self.num_returns == "streaming":
            self.streams.append(LocalStream(self.function(*args, **named)))
            return self.streams[-1]
        whole = asyncio.ensure_future(self._call(args, named))
        if self.num_returns == 1:
            return LocalReference(whole)
        return [LocalReference(asyncio.ensure_future(self._part(whole, i))) for i in range(self.num_returns)]

    async def _call(self, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        given = {name: await _resolved(value) for name, value in named.items()}
        result = self.function(*[await _resolved(value) for value in args], **given)
        return await result if inspect.isawaitable(result) else result

    async def _part(self, whole: asyncio.Future[Any], index: int) -> Any:
        results = await whole
        assert len(results) == self.num_returns, f"{len(results)} results, {self.num_returns} were asked for"
        return results[index]


async def _resolved(value: Any) -> Any:
    """As in Ray, a reference that is an argument arrives as its value."""
    return await value.task if isinstance(value, LocalReference) else value


class LocalStream:
    """What a call that streams returns. As in Ray, values come as fast as they are made."""

    def __init__(self, values: AsyncIterator[Any]) -> None:
        self._ready: deque[LocalReference] = deque()
        self._has_messages = asyncio.Event()
        self._making = asyncio.ensure_future(self._make(values))
        self._death: Exception | None = None

    def die(self, error: Exception) -> None:
        """The process that makes the values dies of `error`; the values made before have been sent."""
        self._death = error
        self._making.cancel()

    def __aiter__(self) -> LocalStream:
        return self

    async def __anext__(self) -> LocalReference:
        while not self._ready and not self._making.done():
            self._has_messages.clear()
            await self._has_messages.wait()
        if self._ready:
            return self._ready.popleft()
        if self._death is not None:
            raise self._death
        await self._making
        raise StopAsyncIteration

    def __next__(self) -> LocalReference:
        return self._ready.popleft()

    def next_ready(self) -> bool:
        return bool(self._ready)

    def completed(self) -> LocalReference:
        return LocalReference(self._making)

    async def _make(self, values: AsyncIterator[Any]) -> None:
        try:
            async for value in values:
                found = asyncio.get_running_loop().create_future()
                found.set_result(value)
                self._ready.append(LocalReference(found))
                self._has_messages.set()
        finally:
            self._has_messages.set()


class LocalHandle:
    """The handle of `role`."""

    def __init__(self, role: Any) -> None:
        self._role = role
        self._streams: list[LocalStream] = []

    def __getattr__(self, name: str) -> LocalMethod:
        return LocalMethod(getattr(self._role, name), self._streams)

    def die(self, error: Exception) -> None:
        """Every stream of the role ends with `error`, after what was sent."""
        for stream in self._streams:
            stream.die(error)


def full_disk(*args: Any) -> None:
    """Takes the place of a file operation."""
    raise OSError(28, "No space left on device")


async def never(*args: Any) -> None:
    """A call that is not answered."""
    await asyncio.Event().wait()


AT_ONCE = RestartPolicy(max_restarts=3, window_s=1000, backoff_s=0, max_backoff_s=0)


class FakeHosts:
    """Implements `mobula.cluster.workers.work_queue.Hosts`. `start(index)` is what makes a worker; it may raise."""

    def __init__(
        self, start: Callable[[int], Any], *, booked: int = 0, end: Callable[[Any], None] = lambda handle: None
    ) -> None:
        """Places 0 to `booked` - 1 are taken by the first workers; `end` stops a worker."""
        self._start = start
        self._end = end
        self.booked = set(range(booked))
        self.started: Counter[int] = Counter()
        self.stopped: list[tuple[int, Any]] = []

    async def start(self, index: int) -> Any:
        await asyncio.sleep(0)
        self.booked.add(index)
        self.started[index] += 1
        return self._start(index)

    async def stop(self, index: int, handle: Any) -> None:
        await asyncio.sleep(0)
        self.stopped.append((index, handle))
        self._end(handle)

    async def release(self, index: int) -> None:
        await asyncio.sleep(0)
        self.booked.discard(index)


async def settle() -> None:
    """Let everything that can go on without waiting for another task go on."""
    await turns(50)


class FixedMembers:
    """Loses the members that it is asked to lose, and replaces none."""

    def __init__(self, *receivers: Any) -> None:
        self.lost: dict[str, Exception] = {}
        self.versions: dict[str, int] = {}
        self.versions_announced: list[int] = []
        self.version = -1
        self._receivers = list(receivers)

    def receivers(self) -> list[Any]:
        return list(self._receivers)

    def add(self, receiver: Any) -> None:
        self._receivers.append(receiver)

    def announced(self, version: int) -> None:
        self.versions_announced.append(version)

    def synced(self, receiver: Any, version: int) -> None:
        self.versions[receiver.name] = version

    def published(self, version: int) -> None:
        self.version = version

    def lose(self, receiver: Any, error: Exception) -> None:
        self.lost[receiver.name] = error
        self._receivers.remove(receiver)


def pushes_of(sync: Any) -> list[Any]:
    """Every push that this `WeightSync` publishes from now on."""
    pushes: list[Any] = []

    async def keep(push: Any) -> None:
        pushes.append(push)

    sync.on_published.append(keep)
    return pushes
