"""AgentPrograms: what plays the tasks of an AgentEnvironment."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Protocol

Outcome = Mapping[str, Any]
"""`rewards` by name and `is_truncated` of an episode; or `error`, why it has no reward."""


class AgentPrograms(Protocol):
    """Plays tasks, each by a program that calls the endpoint which it is given."""

    num_tasks: int

    def play(self, task: int, base_url: str) -> tuple[str, Future[Outcome]]:
        """Begin a task; the episode's id, and what comes of it."""
        ...

    def cancel(self, name: str) -> None:
        """End an episode; its outcome does not come."""
        ...
