"""Vitals: what a worker's process uses and has in hand, as it says with every sign of life."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


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
