"""Tools that every reward function is constructed with."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from mobula.rewards.isolation.deadline import InTime
from mobula.rewards.isolation.process import Isolated


@dataclass(frozen=True)
class Tools:
    """`isolated` runs what may hang, in one process or in a pool; models compute on `device` in `dtype`. Of each of its
    GPUs the process takes `gpu_share` of the memory.

    How many answers are worked on side by side is how many processes `isolated` has (`IsolatedPool.num_processes`).
    What cannot leave the process, a model or an engine, computes through `in_time`.
    """

    isolated: Isolated
    device: str
    dtype: str
    in_time: InTime = field(default_factory=InTime)
    gpu_share: float = 1.0
    _shared: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def shared(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The result of `make`, computed once for all functions that have these tools."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]
