"""Measures the load of a vLLM engine from the statistics of each step."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from mobula.cluster.runtime.vitals import EngineLoad


class LoadLogger(StatLoggerBase):
    """Keeps the latest statistics of one engine. With a logger vLLM collects statistics, also for Prometheus."""

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self._kv_usage = 0.0
        self._num_running = 0
        self._num_waiting = 0
        self._num_preemptions = 0
        self._num_expected = 0  # preemptions by the next push

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            self._kv_usage = scheduler_stats.kv_cache_usage
            self._num_running = scheduler_stats.num_running_reqs
            self._num_waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
        if iteration_stats is not None:
            num_preempted = iteration_stats.num_preempted_reqs
            num_expected = min(self._num_expected, num_preempted)
            self._num_expected -= num_expected
            self._num_preemptions += num_preempted - num_expected

    def expect_push(self) -> None:
        """Excludes the preemptions of a weight push, which do not indicate load."""
        self._num_expected = self._num_running

    def log_engine_initialized(self) -> None: ...

    def load(self) -> EngineLoad:
        """Returns the load after the latest step."""
        return EngineLoad(self._kv_usage, self._num_running, self._num_waiting, self._num_preemptions)
