"""Seat: a place of the rollout fleet, with the state of whichever engine holds it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from cluster.errors import EngineDiedError
from cluster.restarts import RepeatedCause, RestartBudget
from cluster.status import WorkerState, WorkerStatus
from cluster.trajectory import Prompt

Engine = TypeVar("Engine")


@dataclass
class Seat(Generic[Engine]):
    """`in_flight` holds the prompts that the engine works at, by call."""

    index: int
    budget: RestartBudget
    starts: RepeatedCause = field(default_factory=RepeatedCause)  # that failed
    state: WorkerState = WorkerState.STARTING
    engine: Engine | None = None
    version: int | None = None
    num_failures_in_a_row: int = 0
    num_pushes: int = 0  # that were begun while the engine served
    last_sign_s: float = 0.0
    detail: str = ""
    death: EngineDiedError | None = None  # of the engine that was lost last, if it named its cause
    in_flight: dict[object, Prompt] = field(default_factory=dict)
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        return f"rollout/{self.index}"

    @property
    def num_in_flight(self) -> int:
        return len(self.in_flight)

    @contextmanager
    def working_at(self, prompt: Prompt) -> Iterator[None]:
        """The engine has the prompt while the body runs."""
        call = object()
        self.in_flight[call] = prompt
        self.idle.clear()
        try:
            yield
        finally:
            del self.in_flight[call]
            if not self.in_flight:
                self.idle.set()

    def status(self) -> WorkerStatus:
        return WorkerStatus(
            self.name, self.state, self.version, self.num_in_flight, self.budget.num_restarts, self.detail
        )
