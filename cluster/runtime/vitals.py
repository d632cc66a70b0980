"""Vitals: what a worker's process uses and has in hand, as it says with every sign of life."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from cluster.runtime.usage import MIB, GpuProbe, NvidiaGpus, ProcessTree


@dataclass(frozen=True)
class EngineLoad:
    """How loaded one engine is."""

    name: str
    kv_usage: float  # share of its KV cache that responses under way take; 0 where it has none of its own
    num_running: int  # responses that are decoded
    num_waiting: int  # responses that wait in its queue
    num_preemptions: int  # of responses, for want of KV blocks, since it was started
    num_tokens: int = 0  # sampled since it was started


@dataclass(frozen=True)
class Vitals:
    """One worker, as of one sign of life. What cannot be measured there is None."""

    node: str  # the Ray address of its node
    pid: int
    rss_bytes: int | None  # of the process and its children
    busy_share: float | None  # of the planned threads, as CPU time since the sign before
    gpu_bytes: int | None = None  # taken on its GPUs, by all processes
    gpu_busy_share: float | None = None  # mean over its GPUs
    load: EngineLoad | None = None  # of a worker with an engine
    tokens_per_s: float | None = None  # that its engine sampled since the sign before


@dataclass(frozen=True)
class ObjectStoreUse:
    """The object stores of all nodes together."""

    used_bytes: int
    total_bytes: int


@runtime_checkable
class HasEngine(Protocol):
    """A role with an engine of its own."""

    def engine_load(self) -> EngineLoad:
        """Returns at once, from any thread, also before the engine is there."""
        ...


class VitalsMeter:
    """Measures this process, its children and the GPUs that it sees; each reading covers the time since the last."""

    def __init__(self, node: str, num_threads: int, gpus: GpuProbe | None = None) -> None:
        """`node` is the address of this node, `num_threads` what is planned for the process."""
        self._node = node
        self._num_threads = num_threads
        self._tree = ProcessTree(os.getpid())
        self._gpus = NvidiaGpus(os.environ) if gpus is None else gpus
        self._num_tokens, self._read_at = 0, time.monotonic()

    def read(self, load: EngineLoad | None) -> Vitals:
        """`load` is that of the worker's engine, if it has one."""
        used, gpus = self._tree.read(), self._gpus.read()
        now, tokens_per_s = time.monotonic(), None
        if load is not None:
            tokens_per_s = (load.num_tokens - self._num_tokens) / max(now - self._read_at, 1e-3)
            self._num_tokens = load.num_tokens
        self._read_at = now
        shares = [gpu.utilization_percent / 100 for gpu in gpus if gpu.utilization_percent is not None]
        return Vitals(
            node=self._node,
            pid=os.getpid(),
            rss_bytes=None if used is None else int(used[1] * MIB),
            busy_share=None if used is None else min(1.0, used[0] / 100 / self._num_threads),
            gpu_bytes=int(sum(gpu.memory_used_mib for gpu in gpus) * MIB) if gpus else None,
            gpu_busy_share=sum(shares) / len(shares) if shares else None,
            load=load,
            tokens_per_s=tokens_per_s,
        )
