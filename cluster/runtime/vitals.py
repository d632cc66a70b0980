"""Vitals: resource usage and load of a worker's process, returned by every health check."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineLoad:
    """The load of one engine."""

    kv_usage: float  # used share of the KV cache, 0 to 1; 0 without a KV cache
    num_running: int  # responses being decoded
    num_waiting: int  # responses in the queue
    num_preemptions: int  # of responses for lack of KV blocks, since the start
    num_tokens: int = 0  # sampled since the start


@dataclass(frozen=True)
class Vitals:
    """One worker at one health check. Values that cannot be measured are None."""

    node: str  # Ray address of the node
    pid: int
    rss_bytes: int | None  # of the process and its children
    busy_share: float | None  # CPU time since the previous check / time of the planned threads
    gpu_bytes: int | None = None  # used on the worker's GPUs, by all processes
    gpu_busy_share: float | None = None  # mean over the worker's GPUs
    load: EngineLoad | None = None  # of a worker with an engine
    tokens_per_s: float | None = None  # sampled by the engine since the previous check


@dataclass(frozen=True)
class ObjectStoreUse:
    """The object stores of all nodes together."""

    used_bytes: int
    total_bytes: int
