"""RaySink: gauges in `ray.util.metrics`, which Ray exports to Prometheus and its dashboard."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from ray.util.metrics import Gauge

from cluster.metrics.definitions import COUNTERS, describe
from cluster.metrics.step_records import HELD_OUT, EvaluationRecord, StepRecord

Key = tuple[str, str]  # (series, value of its extra tag; empty where it has none)
_EXTRA_TAG = {"seconds": "phase", "reward_component": "component", "staleness_tokens": "lag"}


class TaggedGauge(Protocol):
    """One gauge with tags."""

    def set(self, value: float, tags: dict[str, str]) -> None: ...


def ray_series(name: str, description: str, tag_keys: tuple[str, ...]) -> TaggedGauge:
    """A gauge of Ray; it needs a connected driver or worker to be exported."""
    return Gauge(name, description=description, tag_keys=tag_keys)


class RaySink:
    """Sets one gauge a number, tagged with run, role and index.

    Ray forgets a gauge about 20 s after it was last set, and a step may take longer: a thread sets all of them again
    every `heartbeat_s` (at most 10 s, `metrics.heartbeat_s`) until `close()`. What fails in the thread is raised by the
    next `emit`. Counts are gauges too: after a resume a counter of Ray could not start where the run stood.
    """

    name = "ray"

    def __init__(
        self,
        tags: Mapping[str, str],
        *,
        heartbeat_s: float,
        make_series: Callable[[str, str, tuple[str, ...]], TaggedGauge] = ray_series,
    ) -> None:
        if {"run", "role", "index"} != set(tags):
            raise ValueError(f"Ray metrics are tagged with run, role and index, got {sorted(tags)}")
        self._tags = dict(tags)
        self._heartbeat_s = heartbeat_s
        self._make_series = make_series
        self._series: dict[str, TaggedGauge] = {}
        self._latest: dict[Key, float] = {}
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._beat, name="metrics-heartbeat", daemon=True)
        self._thread.start()

    def emit(self, record: StepRecord) -> None:
        gone = {key: 0.0 for key in self._latest if key[0] == "staleness_tokens"}  # a lag that this step did not have
        self._publish({**gone, **_flat(record)})

    def emit_evaluation(self, record: EvaluationRecord) -> None:
        """Gauges of the run's own suite; the others are in metrics.jsonl and TensorBoard."""
        if record.suite != HELD_OUT:
            return
        self._publish({("evaluation_accuracy", ""): record.accuracy, ("evaluation_version", ""): record.version})

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
        while not self._is_closing.wait(self._heartbeat_s):
            try:
                with self._lock:
                    self._set_all(self._latest)
            except Exception as error:  # carried to the next emit, which drops this sink
                self._failure = error
                return

    def _set_all(self, values: Mapping[Key, float]) -> None:
        for (name, extra), value in values.items():
            if math.isfinite(value):
                tags = {**self._tags, **_extra_tag(name, extra)}
                self._find(name, tuple(tags)).set(value, tags=tags)

    def _find(self, name: str, tag_keys: tuple[str, ...]) -> TaggedGauge:
        if name not in self._series:
            self._series[name] = self._make_series(_series_name(name), _describe(name), tag_keys)
        return self._series[name]

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError("the heartbeat of the Ray metrics has stopped") from self._failure


def _series_name(name: str) -> str:
    """Prometheus knows letters, digits and underscores only."""
    return "mobula_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)


def _extra_tag(name: str, extra: str) -> dict[str, str]:
    """The fourth tag of a series that has one; that of a counter is the reason."""
    key = _EXTRA_TAG[name] if name in _EXTRA_TAG else "reason"
    return {key: extra} if extra else {}


def _flat(record: StepRecord) -> dict[Key, float]:
    """Every number of a record under its series and extra tag."""
    return {
        ("step", ""): record.step,
        **{(name, ""): value for name, value in record.values.items()},
        **{("seconds", phase): seconds for phase, seconds in record.seconds.items()},
        **{("reward_component", name): mean for name, mean in record.components.items()},
        **{("staleness_tokens", str(lag)): float(tokens) for lag, tokens in record.staleness.items()},
        **{
            (f"{name}_total", reason): float(count)
            for name, reasons in record.counters.items()
            for reason, count in reasons.items()
        },
    }


def _describe(name: str) -> str:
    counter = name.removesuffix("_total")
    metric = COUNTERS[counter] if counter in COUNTERS and counter != name else describe(name)
    return f"{metric.help} [{metric.unit}]" if metric.unit else metric.help
