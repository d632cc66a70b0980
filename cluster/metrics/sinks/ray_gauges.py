"""RaySink: sets gauges of `ray.util.metrics`, which Ray exports to Prometheus and its dashboard."""

from __future__ import annotations

import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass

from ray.util.metrics import Gauge

from mobula.cluster.metrics.definitions import ALL_REASONS, CounterName, LiveName, SplitName, describe
from mobula.cluster.metrics.step_records import HELD_OUT, EvaluationRecord, StepRecord
from mobula.cluster.workers.status import RunStatus, WorkerState, WorkerStatus

Key = tuple[str, str]  # (series, value of the extra tag or "")
WorkerKey = tuple[str, str, str, str, str]  # (series, role, index of the worker or "", node, extra tag)


@dataclass(eq=False)
class RaySink:
    """Sets one gauge per number, tagged with run, role and index.

    Ray forgets a gauge about 20 s after its last value, and a step may take longer. So a thread sets all gauges again
    every `heartbeat_s` (at most 10 s, `metrics.heartbeat_s`) until `close()`. An error of the thread is raised by the
    next `emit`. Counts are gauges, too, because a counter of Ray always starts at 0, also after a resume. Their sum
    over all reasons exists from the start, at 0. Gauges of workers are tagged with the worker's role, index and node.
    """

    name = "ray"

    tags: Mapping[str, str]
    _: KW_ONLY
    heartbeat_s: float
    make_series: Callable[[str, str, tuple[str, ...]], Gauge] = Gauge
    now: Callable[[], float] = time.time  # seconds since the epoch

    def __post_init__(self) -> None:
        if {"run", "role", "index"} != set(self.tags):
            raise ValueError(f"Ray metrics are tagged with run, role and index, got {sorted(self.tags)}")
        self._series: dict[str, Gauge] = {}
        self._latest: dict[Key, float] = {}
        self._of_workers: dict[WorkerKey, float] = {}
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._beat, name="metrics-heartbeat", daemon=True)
        counters = {(f"{name}_total", ALL_REASONS): 0.0 for name in CounterName}
        live = {LiveName.UP: 1.0, LiveName.STEP: 0.0, LiveName.LAST_STEP_TIME: self.now()}
        self._publish({(name, ""): value for name, value in live.items()} | counters)
        self._thread.start()

    def post(self, status: RunStatus) -> None:
        """Takes the run status between steps; the next heartbeat exports it."""
        with self._lock:
            phases = {key: 0.0 for key in self._latest if key[0] == LiveName.PHASE}
            self._latest.update({**phases, **_of_run(status)})
            self._of_workers = dict(_of_workers(status))

    def emit(self, record: StepRecord) -> None:
        gone = {key: 0.0 for key in self._latest if key[0] == "staleness_tokens"}  # lags without tokens in this step
        self._publish({**gone, **_flat(record), (LiveName.LAST_STEP_TIME, ""): self.now()})

    def emit_evaluation(self, record: EvaluationRecord) -> None:
        """Sets the gauges of the run's own suite; other suites are in metrics.jsonl and TensorBoard only."""
        if record.suite != HELD_OUT:
            return
        accuracy, version = SplitName.EVALUATION_ACCURACY, SplitName.EVALUATION_VERSION
        self._publish({(accuracy, ""): record.accuracy, (version, ""): record.version})

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join()
        self._raise_failure()

    def _publish(self, values: Mapping[Key, float]) -> None:
        self._raise_failure()
        with self._lock:
            self._latest.update(values)
            self._set_all(values)

    def _beat(self) -> None:
        while not self._is_closing.wait(self.heartbeat_s):
            try:
                with self._lock:
                    self._set_all(self._latest)
                    for (name, role, index, node, extra), value in self._of_workers.items():
                        tags = {**self.tags, "role": role, "index": index, "node": node, **_extra_tag(name, extra)}
                        self._find(name, tuple(tags)).set(value, tags=tags)
            except Exception as error:  # the next `emit` raises it, which drops this sink
                self._failure = error
                return

    def _set_all(self, values: Mapping[Key, float]) -> None:
        for (name, extra), value in values.items():
            if math.isfinite(value):
                tags = {**self.tags, **_extra_tag(name, extra)}
                self._find(name, tuple(tags)).set(value, tags=tags)

    def _find(self, name: str, tag_keys: tuple[str, ...]) -> Gauge:
        if name not in self._series:
            allowed = re.sub(r"[^a-zA-Z0-9_]", "_", name)  # by Prometheus
            self._series[name] = self.make_series(f"mobula_{allowed}", describe(name), tag_keys)
        return self._series[name]

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError("the heartbeat of the Ray metrics has stopped") from self._failure


def _extra_tag(name: str, extra: str) -> dict[str, str]:
    key = next((metric.tag for metric in (*LiveName, *SplitName) if metric == name), "reason")
    return {key: extra} if extra else {}


def _of_run(status: RunStatus) -> dict[Key, float]:
    progress, store = status.progress, status.object_store
    gauges: dict[Key, float] = {
        (LiveName.LOOP_LAG_S, ""): status.loop_lag_s,
        (LiveName.PHASE, progress.phase): 1.0,
        (LiveName.PHASE_SECONDS, ""): progress.seconds,
        (LiveName.STEP, ""): float(progress.step),
        (LiveName.TOTAL_STEPS, ""): float(status.total_steps),
        (LiveName.IN_FLIGHT, ""): float(status.in_flight.num_prompts),
        (LiveName.IN_FLIGHT_OLDEST_AGE_S, ""): status.in_flight.oldest_age_s,
    }
    if store is not None:
        gauges[LiveName.OBJECT_STORE_BYTES, ""] = float(store.used_bytes)
        gauges[LiveName.OBJECT_STORE_SIZE_BYTES, ""] = float(store.total_bytes)
    return gauges


def _of_workers(status: RunStatus) -> Iterator[tuple[WorkerKey, float]]:
    """Yields the gauges of every worker, and the number of workers by role and state (0 for a state without any)."""
    states: dict[str, Counter[str]] = {}
    for worker in status.workers:
        role, _, index = worker.name.partition("/")
        states.setdefault(role, Counter())[worker.state] += 1
        node = "" if worker.vitals is None else worker.vitals.node
        for name, value in _of_worker(worker):
            yield (name, role, index, node, ""), value
    for role, num_by_state in states.items():
        for state in WorkerState:
            yield (LiveName.WORKERS, role, "", "", state.value), float(num_by_state[state])


def _of_worker(worker: WorkerStatus) -> Iterator[tuple[LiveName, float]]:
    vitals = worker.vitals
    load = None if vitals is None else vitals.load
    known: dict[LiveName, float | None] = {
        LiveName.WORKER_VERSION: worker.version,
        LiveName.WORKER_IN_FLIGHT: worker.num_in_flight,
        LiveName.WORKER_RESTARTS: worker.num_restarts,
    }
    if vitals is not None:
        known |= {
            LiveName.WORKER_TOKENS_PER_S: vitals.tokens_per_s,
            LiveName.WORKER_BUSY_SHARE: vitals.busy_share,
            LiveName.WORKER_RSS_BYTES: vitals.rss_bytes,
            LiveName.WORKER_GPU_BYTES: vitals.gpu_bytes,
            LiveName.WORKER_GPU_BUSY_SHARE: vitals.gpu_busy_share,
        }
    if load is not None:
        known |= {
            LiveName.WORKER_KV_USAGE: load.kv_usage,
            LiveName.WORKER_RUNNING: load.num_running,
            LiveName.WORKER_QUEUE: load.num_waiting,
        }
    for name, value in known.items():
        if value is not None:
            yield name, float(value)


def _flat(record: StepRecord) -> dict[Key, float]:
    return {
        (LiveName.STEP, ""): record.step,
        **{(name, ""): value for name, value in record.values.items()},
        **{(SplitName.SECONDS, phase): seconds for phase, seconds in record.seconds.items()},
        **{(SplitName.REWARD_COMPONENT, name): mean for name, mean in record.components.items()},
        **{(SplitName.STALENESS_TOKENS, str(lag)): float(tokens) for lag, tokens in record.staleness.items()},
        **{
            (f"{name}_total", reason): float(count)
            for name, reasons in record.counters.items()
            for reason, count in {**reasons, ALL_REASONS: sum(reasons.values())}.items()
        },
    }
