"""Metrics: collects values, times the start and feeds the sinks."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from mobula.cluster.errors import RunStopped
from mobula.cluster.metrics import step_records
from mobula.cluster.metrics.definitions import CounterName, MetricName
from mobula.cluster.metrics.sinks.base import SampleSink, Sink
from mobula.cluster.tracing.tracer import UNTRACED, RunTracer
from mobula.cluster.workers.status import Progress, RunStatus

if TYPE_CHECKING:
    from mobula.cluster.metrics.guard_events import SignalWatch
    from mobula.cluster.metrics.sinks.ray_gauges import RaySink
    from mobula.cluster.records.trajectory import Reward, ScoredGroup
    from mobula.cluster.roles import ReplayStats, UpdateReport

_logger = logging.getLogger(__name__)


@contextmanager
def informing(what: str) -> Iterator[None]:
    """Logs an error of the body, such as a full disk, with its traceback; `what` names the output."""
    try:
        yield
    except Exception:
        _logger.exception("%s could not be written; the run goes on without it", what)


T = TypeVar("T")
FIRST_RESPONSE = "first response"
TOTAL = "total"


class StartUp:
    """Phases that run side by side (engines, learner, scorers) each count from the same moment. `clock` is monotonic,
    in seconds; `begun` is the start of the run on it."""

    def __init__(self, begun: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}  # by phase, in the order of their ends
        self._clock = clock
        self._begun = begun
        self._last = begun  # end of the newest phase

    def ended(self, phase: str, seconds: float | None = None) -> None:
        """Records the first end of `phase`, by default begun at the end of the phase before."""
        now = self._clock()
        self.seconds.setdefault(phase, now - self._last if seconds is None else seconds)
        self._last = now

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Measures the body as `phase` if it succeeds."""
        start = self._clock()
        yield
        self.ended(phase, self._clock() - start)

    async def timing(self, phase: str, work: Coroutine[Any, Any, T]) -> T:
        """Awaits `work`, measured as `phase`, and returns its result."""
        with self.timed(phase):
            return await work

    def responded(self) -> None:
        """Records the first response; later calls have no effect."""
        if TOTAL in self.seconds:
            return
        self.ended(FIRST_RESPONSE)
        self.seconds[TOTAL] = self._clock() - self._begun
        phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self.seconds.items() if phase != TOTAL)
        _logger.info("first response after %.1f s: %s", self.seconds[TOTAL], phases)


# Metrics: collects the numbers of the loop into one record per step and passes it to the sinks.
#
# with metrics.step(version + 1) as step:
#     with step.timed("update"):
#         update = await learner.update(groups)
#     step.record(groups, update, await replay.stats())

Clock = Callable[[], float]
STARTING = "starting"  # engines, warm start, first push, first evaluation
BETWEEN_PHASES = "other"
ENDING = "ending"
MAX_REASONS = 24  # of rewards that are counted by name; others are counted together
OTHER = "other"

LASTING = (  # gauges that a resume does not set again
    MetricName.HELD_OUT_LOSS,
    MetricName.HELD_OUT_MARGIN,
    MetricName.CANARY,
    MetricName.CANARY_MEDIA,
    MetricName.CANARY_TEMPLATE,
    MetricName.CANARY_TEXT,
)


class Samples(Protocol):
    """Keeps a few responses of the run for the report."""

    def offer(self, step: int, groups: Sequence[ScoredGroup]) -> Sequence[step_records.SampleRecord]:
        """Selects responses from the groups of one step and returns them."""


class MeasuredStep:
    """One running step: its phases are timed, then its result is recorded once."""

    def __init__(self, step: int, clock: Clock, accuracy_component: str, tracer: RunTracer) -> None:
        self.groups: Sequence[ScoredGroup] = ()
        self.replay: ReplayStats | None = None
        self.rejected: Sequence[Sequence[Reward | None]] = ()  # rewards of groups rejected since the previous step
        self._step = step
        self._clock = clock
        self._accuracy_component = accuracy_component
        self._tracer = tracer
        self._start = clock()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._update: Mapping[str, float] = {}
        self._phase, self._phase_start = BETWEEN_PHASES, self._start

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the seconds of the body to `phase`. Phases do not nest."""
        start = self._clock()
        self._phase, self._phase_start = phase, start
        try:
            with self._tracer.span([f"step {self._step}"], phase):
                yield
        finally:
            self._phase, self._phase_start = BETWEEN_PHASES, self._clock()
            self._seconds[phase] += self._phase_start - start

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds of the phases that are over."""
        return dict(self._seconds)

    def include(self, seconds: Mapping[str, float]) -> None:
        """Adds phases that the step had in an earlier part of the run, which did not record it."""
        self._start -= math.fsum(seconds.values())
        self._seconds.update(seconds)

    def progress(self) -> Progress:
        return Progress(self._step, self._phase, self._clock() - self._phase_start)

    def record(self, groups: Sequence[ScoredGroup], update: UpdateReport, replay: ReplayStats) -> None:
        assert groups, f"step {self._step} recorded no groups"
        self.groups, self.replay, self._update = groups, replay, update.metrics

    def finish(self, observed: Mapping[str, float], counters: Mapping[str, Counter[str]]) -> step_records.StepRecord:
        """Returns the step's record. `observed` are the run's gauges."""
        assert self.replay is not None, f"step {self._step} ended without step.record(...)"
        total = self._clock() - self._start
        other = max(0.0, total - math.fsum(self._seconds.values()))
        staleness = step_records.staleness_of(self.groups, trained_version=self._step - 1)
        components = step_records.component_means(self.groups)
        values = step_records.step_values(self.groups, self.replay, staleness, total)
        values |= step_records.sampled_values(
            [*(group.rewards for group in self.groups), *self.rejected], self._accuracy_component
        )
        if self._accuracy_component in components:  # recipes may leave it out
            values[MetricName.ACCURACY] = components[self._accuracy_component]
        return step_records.StepRecord(
            step=self._step,
            seconds={**self._seconds, "other": other, "total": total},
            values={**observed, **{name: float(v) for name, v in self._update.items()}, **values},  # ours win
            staleness=staleness,
            components=components,
            counters={name: dict(reasons) for name, reasons in counters.items()},
            correlations=step_records.correlations(self.groups),
        )


@dataclass(eq=False)
class Metrics:
    """The hub of all metrics: keeps the run's totals and emits one `StepRecord` per successful step.

    `clock` is monotonic, in seconds (`time.perf_counter`). A sink that fails is logged, counted and dropped; a report
    sample that cannot be fetched is logged and counted. Neither ends the run.
    """

    sinks: Sequence[Sink]
    clock: Clock
    _: KW_ONLY
    accuracy_component: str
    samples: Sequence[Samples] = ()
    watchers: Sequence[RaySink] = ()  # get the run's status between steps
    signal: SignalWatch | None = None  # detects that nothing is learned
    tracer: RunTracer = UNTRACED
    start_up: StartUp = field(default_factory=lambda: StartUp(time.perf_counter()))  # has the phases before this call

    def __post_init__(self) -> None:
        self.totals = step_records.RunTotals()
        self._sinks = list(self.sinks)  # that have not failed
        self._observed: dict[str, float] = {}
        self._counters: dict[str, Counter[str]] = {}
        self._sources: dict[str, Mapping[str, int]] = {}
        self._rejected: list[Sequence[Reward | None]] = []  # rewards of groups rejected since the newest step
        self._scope: MeasuredStep | None = None
        self._outside, self._outside_start = STARTING, self.clock()

    def resume(self, records: Sequence[step_records.MetricsRecord]) -> None:
        """Restores totals and counters of an earlier part of this run from the records that `JsonlSink` kept."""
        for record in records:
            if isinstance(record, step_records.EvaluationRecord):
                self.totals.add_evaluation(record)
            else:
                self.totals.add(record)
                if self.signal is not None:
                    self.signal.look(record, ())
                self._counters = {name: Counter(reasons) for name, reasons in record.counters.items()}
                self._observed = {name: record.values[name] for name in LASTING if name in record.values}

    @contextmanager
    def step(self, step: int) -> Iterator[MeasuredStep]:
        """Measures the step that makes version `step`. Emits nothing if the body raises, or if an earlier part of this
        run has recorded the step (a resume repeats steps). A step that was recorded before the run was stopped is
        emitted, because it is not repeated."""
        scope = self._scope = MeasuredStep(step, self.clock, self.accuracy_component, self.tracer)
        try:
            with self.tracer.step(step):
                yield scope
        except RunStopped:
            if scope.replay is not None:
                self._emit(step, scope)
            raise
        finally:
            self._scope, self._outside, self._outside_start = None, ENDING, self.clock()
        self._emit(step, scope)

    def _emit(self, step: int, scope: MeasuredStep) -> None:
        if step <= self.totals.version:
            return
        samples = self._kept_samples(step, scope.groups)
        for reason, num in step_records.reasons_of(scope.groups).items():
            known = self.counts(CounterName.REWARD_REASONS)
            name = reason if reason in known or len(known) < MAX_REASONS else OTHER
            self.count(CounterName.REWARD_REASONS, name, num)
        scope.rejected, self._rejected = self._rejected, []
        record = scope.finish(self._observed, self._counters)
        self.totals.add(record)
        self._each(lambda sink: sink.emit(record))
        if samples:
            self._each(lambda sink: sink.emit_samples(samples) if isinstance(sink, SampleSink) else None)
        self._warn_of_idle_steps(record, scope.groups)

    def seconds(self) -> Mapping[str, float]:
        """Returns the seconds of the phases of the step so far."""
        return {} if self._scope is None else self._scope.seconds

    def progress(self) -> Progress:
        """Returns the current phase of the step; `starting` before the first step, `ending` after the last."""
        if self._scope is not None:
            progress = self._scope.progress()
        else:
            progress = Progress(self.totals.version, self._outside, self.clock() - self._outside_start)
        if self.totals.num_steps == 0:
            return progress
        step_s = self.totals.seconds["total"] / self.totals.num_steps
        return replace(progress, step_s=step_s, tokens_per_s=self.totals.last_values[MetricName.TOKENS_PER_S])

    def post(self, status: RunStatus) -> None:
        for watcher in self.watchers:
            watcher.post(status)

    def record_evaluation(self, record: step_records.EvaluationRecord) -> None:
        self.totals.add_evaluation(record)
        self._each(lambda sink: sink.emit_evaluation(record))

    def rejected(self, rewards: Sequence[Reward | None]) -> None:
        """Includes a finished group that is not trained in the next step's means over all sampled groups."""
        self._rejected.append(rewards)

    def count(self, name: CounterName, reason: str, n: int = 1) -> None:
        """Adds `n` to a counter. The next step's record and the summary have the sum."""
        self._counters.setdefault(name, Counter())[reason] += n

    def count_up_to(self, name: CounterName, totals: Mapping[str, int]) -> None:
        """Adds the increase of totals that a role counts since its start; a restarted role counts from 0 again."""
        last = self._sources[name] if name in self._sources else {}
        is_new = any(totals[r] < n if r in totals else n > 0 for r, n in last.items())
        known = Counter({} if is_new else last)
        for reason, total in totals.items():
            if total > known[reason]:
                self.count(name, reason, total - known[reason])
        self._sources[name] = dict(totals)

    def set_counts(self, name: CounterName, totals: Mapping[str, int]) -> None:
        """Sets a counter's values, for counts that do not depend on restarts of the run."""
        self._counters[name] = Counter(totals)

    def observe(self, name: MetricName, value: float) -> None:
        """Sets a gauge of the run (e.g. media bytes). Every later step record has the newest value."""
        self._observed[name] = value

    def observed(self, name: MetricName) -> float | None:
        """Returns the newest value of a gauge or step value; None if it was never set, also before a resume."""
        known = {**self.totals.last_values, **self._observed}
        return known[name] if name in known else None

    def counts(self, name: CounterName) -> dict[str, int]:
        """Returns reason -> count since the start of the run."""
        return dict(self._counters[name]) if name in self._counters else {}

    @property
    def warnings(self) -> Sequence[str]:
        conclusion = None if self.signal is None else self.signal.conclusion()
        return () if conclusion is None else (conclusion,)

    def close(self) -> None:
        self._each(lambda sink: sink.close())
        self._sinks.clear()

    def _each(self, call: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                call(sink)
            except Exception:  # a full disk or a lost tracker must not end the run
                _logger.exception("metrics sink %s failed and is dropped; the run goes on without it", sink.name)
                self._sinks.remove(sink)
                self.count(CounterName.DROPPED_SINKS, sink.name)

    def _kept_samples(self, step: int, groups: Sequence[ScoredGroup]) -> Sequence[step_records.SampleRecord]:
        try:
            return [sample for keeper in self.samples for sample in keeper.offer(step, groups)]
        except Exception:  # a sample of the report must not end the run
            _logger.exception("step %d: a report sample could not be kept", step)
            self.count(CounterName.DROPPED_SAMPLES, "error")
            return ()

    def _warn_of_idle_steps(self, record: step_records.StepRecord, groups: Sequence[ScoredGroup]) -> None:
        try:
            warning = None if self.signal is None else self.signal.look(record, groups)
        except Exception:  # a sample of a warning must not end the run
            _logger.exception("step %d: the samples of a warning cannot be fetched", record.step)
            return
        if warning is not None:
            _logger.warning("%s", warning)
