"""AgentPrograms: the protocol of programs that run the tasks of an AgentEnvironment."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Protocol

Outcome = Mapping[str, Any]
"""`rewards` by name and `is_truncated` of an episode; or `error`, if there is no reward."""


class AgentPrograms(Protocol):
    """Runs a program for each task; the program calls the policy at an endpoint."""

    num_tasks: int

    def play(self, task: int, base_url: str) -> tuple[str, Future[Outcome]]:
        """Starts a task; returns the episode's id and the future outcome."""
        ...

    def cancel(self, name: str) -> None:
        """Ends an episode; the future outcome is never set."""
        ...
