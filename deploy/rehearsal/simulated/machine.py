"""Simulated time, cores, lengths and faults."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import math
import re
import selectors
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, get_args

import numpy as np
import yaml

from mobula.cluster.errors import PreflightError

Result = TypeVar("Result")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`time()` is 0 s at first and moves only while every task waits, and then at once to the earliest timer.

    What a task computes takes no time. What it would give to a thread is done on the spot, since a clock that jumps
    while a thread works would run ahead of it. So a program's course depends on its timers alone. A loop in which
    nothing is left to happen raises an error, where a real one would wait for ever.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._ends_at_s = math.inf
        self._on_end: Callable[[], object] | None = None
        super().__init__(_JumpingSelector(self._jump, self._look))

    def time(self) -> float:
        return self._now

    def run_in_executor(  # type: ignore[override]  # a narrower signature than the typeshed's
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def after_wall_s(self, seconds: float, callback: Callable[[], object]) -> None:
        """Calls `callback` once after `seconds` on this machine, whatever the virtual time."""
        self._ends_at_s, self._on_end = time.perf_counter() + seconds, callback

    def _look(self) -> None:
        if self._on_end is not None and time.perf_counter() >= self._ends_at_s:
            self.call_soon(self._on_end)
            self._on_end = None

    def _jump(self, seconds: float) -> None:
        self._now += seconds


def run_virtually(main: Coroutine[Any, Any, Result]) -> Result:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


class _JumpingSelector(selectors.DefaultSelector):
    """Looks at its files without waiting, and has the clock moved by as much as it was to wait."""

    def __init__(self, jump: Callable[[float], None], look: Callable[[], None]) -> None:
        super().__init__()
        self._jump = jump
        self._look = look

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._look()
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("every task waits for another and no timer is set: nothing can happen any more")
        if not ready and timeout is not None and timeout > 0:
            self._jump(timeout)
        return ready


class CpuMeter:
    """Measures the driver's code: the CPU time of the thread, less the time inside `with meter:`.

    The simulated parts of a rehearsal enter the meter while they compute. Entries do not nest.
    """

    def __init__(self) -> None:
        self._started_s = time.thread_time()
        self._simulation_s = 0.0
        self._entered_s: float | None = None

    def __enter__(self) -> None:
        self._entered_s = time.thread_time()

    def __exit__(self, *error: object) -> None:
        if self._entered_s is not None:
            self._simulation_s += time.thread_time() - self._entered_s
            self._entered_s = None

    @property
    def driver_s(self) -> float:
        return time.thread_time() - self._started_s - self._simulation_s

    @property
    def simulation_s(self) -> float:
        return self._simulation_s


class Work(Protocol):
    """Work whose speed depends on the other work on the same processors."""

    def settle(self) -> None:
        """Adds the progress up to now, at the speed until now."""

    def replan(self) -> None:
        """Sets the timer of the next event, at the new speed."""


class Cores:
    """Processors that divide their time equally among the threads that compute.

    Every thread has the speed `min(1, num_cores / threads)`. With an infinite number of cores no work waits.
    """

    def __init__(self, num_cores: float = math.inf) -> None:
        self.num_cores = num_cores
        self._num_threads = 0.0
        self._works: dict[Work, None] = {}

    @property
    def speed(self) -> float:
        return min(1.0, self.num_cores / self._num_threads) if self._num_threads > self.num_cores else 1.0

    def add(self, work: Work) -> None:
        """Calls `work` on each change of the speed."""
        self._works[work] = None

    def remove(self, work: Work) -> None:
        del self._works[work]

    def occupy(self, num_threads: float) -> None:
        """Changes the number of computing threads; negative when they end."""
        if math.isinf(self.num_cores):
            return
        for work in self._works:
            work.settle()
        self._num_threads += num_threads
        for work in list(self._works):
            work.replan()

    async def compute(self, seconds: float, num_threads: float = 1.0) -> None:
        """Waits for work that takes `seconds` on processors of its own."""
        if math.isinf(self.num_cores):
            await asyncio.sleep(seconds)
            return
        job = _Job(self, seconds)
        self.add(job)
        self.occupy(num_threads)
        try:
            await job.done
        finally:
            self.remove(job)
            self.occupy(-num_threads)


class _Job:
    def __init__(self, cores: Cores, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self._loop.create_future()
        self._cores = cores
        self._left_s = seconds
        self._at_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def settle(self) -> None:
        now = self._loop.time()
        self._left_s -= (now - self._at_s) * self._cores.speed
        self._at_s = now

    def replan(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0.0, self._left_s) / self._cores.speed
        self._timer = self._loop.call_later(delay_s, self._end)

    def _end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


@dataclass(frozen=True)
class LognormalLengths:
    """Lognormal lengths, cut at the length limit of the engine."""

    median: float  # tokens, before the cut
    sigma: float  # of the logarithm; 0: all responses are equal
    max_tokens: int
    seed: int

    def of(self, prompt_id: str, num_siblings: int) -> np.ndarray:
        """Returns the tokens of each sibling, int64 [num_siblings]."""
        normal = _generator(self.seed, prompt_id).standard_normal(num_siblings)
        return np.clip(self.median * np.exp(self.sigma * normal), 1, self.max_tokens).astype(np.int64)


@dataclass(frozen=True)
class RecordedLengths:
    """Lengths drawn with replacement from recorded ones, cut at the length limit of the engine."""

    recorded: Sequence[int]
    max_tokens: int
    seed: int

    def of(self, prompt_id: str, num_siblings: int) -> np.ndarray:
        drawn = _generator(self.seed, prompt_id).choice(np.asarray(self.recorded, dtype=np.int64), num_siblings)
        return np.clip(drawn, 1, self.max_tokens)


ResponseLengths = LognormalLengths | RecordedLengths  # equal for equal prompts in every run of one seed


def _generator(seed: int, prompt_id: str) -> np.random.Generator:
    digest = hashlib.sha256(f"{seed}/{prompt_id}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "big"))


Kind = Literal["node_loss", "preemption", "slow_node", "full_disk"]
WORD = re.compile(r"^(?P<kind>\w+)(?::(?P<node>[\w.-]+))?@(?P<at>\d+)(?:x(?P<factor>[\d.]+))?(?:\+(?P<for>[\d.]+)s?)?$")

HOW = (
    "write KIND[:NODE]@STEP[xFACTOR][+SECONDS], as node_loss:node-1@3, preemption:node-1@3+600, slow_node:node-0@2x1.5 "
    f"or full_disk@4, where KIND is one of {', '.join(get_args(Kind))}"
)

RESTORED_S = 300.0  # a preempted node is back after this time


@dataclass(frozen=True)
class PlannedFault:
    """One fault, which happens in the middle of step `step`."""

    kind: Kind
    step: int
    node_id: str = ""  # empty: the last node
    factor: float = 2.0  # on the seconds of a slow node
    seconds: float = 0.0  # until a preempted or slow node, or the disk, is as before; 0: for ever, or its default


def read_faults(words: Sequence[str], file: Path | None = None) -> tuple[PlannedFault, ...]:
    """Reads a schedule from words and from a YAML file, a list of words or of mappings with a fault's fields."""
    entries: list[Any] = list(words)
    if file is not None:
        try:
            content = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise PreflightError(f"--faults {file} cannot be read ({error}): {HOW}") from error
        if not isinstance(content, list):
            raise PreflightError(f"--faults {file} holds no list of faults: {HOW}")
        entries += content
    return tuple(_fault(entry) for entry in entries)


def disk_error() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def _fault(entry: Any) -> PlannedFault:
    if isinstance(entry, Mapping):
        try:
            fault = PlannedFault(**entry)
        except TypeError as error:
            raise PreflightError(f"a fault {dict(entry)} has unknown or missing keys ({error}): {HOW}") from error
    else:
        match = WORD.match(str(entry))
        if match is None:
            raise PreflightError(f"--fault {entry} is no fault: {HOW}")
        factor, seconds = match["factor"], match["for"]
        kind: Any = match["kind"]
        fault = PlannedFault(kind, int(match["at"]), match["node"] or "", float(factor or 2), float(seconds or 0))
    if fault.kind not in get_args(Kind):
        raise PreflightError(f"a fault of kind {fault.kind} is unknown: {HOW}")
    return fault
