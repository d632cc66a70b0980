"""Tools: resources that every reward function gets at construction."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from mobula.rewards.isolation.process import InTime, Isolated, IsolatedPool


@dataclass(frozen=True)
class Tools:
    """Resources of a reward function. `isolated` runs calls that may hang, in one process or a pool. Models compute on
    `device` in `dtype`, and take `gpu_share` of the memory of each GPU.

    The number of processes of `isolated` (`IsolatedPool.num_processes`) bounds the concurrent calls. Models and
    engines, which cannot move to another process, compute through `in_time`.
    """

    isolated: Isolated
    device: str
    dtype: str
    in_time: InTime = field(default_factory=InTime)
    gpu_share: float = 1.0
    start_timeout_s: float = math.inf
    _shared: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    _pool: Callable[..., IsolatedPool] = IsolatedPool
    _others: dict[str, IsolatedPool] = field(default_factory=dict, repr=False)  # by their Python

    @classmethod
    def timed(
        cls, num_processes: int, timeout_s: float, start_timeout_s: float, device: str, dtype: str, gpu_share: float = 1
    ) -> Tools:
        """Tools with `timeout_s` for one response, and `start_timeout_s` for the import of a user's function."""
        pool = partial(IsolatedPool, num_processes=num_processes, timeout_s=timeout_s, start_timeout_s=start_timeout_s)
        in_time = InTime(timeout_s=timeout_s)
        return cls(pool(), device, dtype, in_time, gpu_share, start_timeout_s, _pool=pool)

    def of_python(self, python: str) -> Tools:
        """The same tools, whose isolated processes run `python`; with an empty one these tools."""
        if not python:
            return self
        if python not in self._others:
            self._others[python] = self._pool(python=python)
        return replace(self, isolated=self._others[python])

    def end_at(self, deadline: float) -> None:
        """Bounds all calls by `deadline` (`time.monotonic`)."""
        for each in (self.isolated, self.in_time, *self._others.values()):
            each.deadline = deadline

    def close(self) -> None:
        """Ends the isolated processes."""
        for each in (self.isolated, *self._others.values()):
            each.close()

    def shared(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Returns the result of `make`, computed once per key for all functions with these tools."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]
