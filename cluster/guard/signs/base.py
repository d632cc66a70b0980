"""Sign: the interface of a sign of reward hacking, and its verdict on the windows of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mobula.cluster.guard.sequential_test import Level
from mobula.cluster.guard.windows import Quantity, Window


@dataclass(frozen=True)
class SignVerdict:
    """The verdict on the newest window.

    `strength` is the evidence in units of the critical value: 1 or more is an alarm. `agreeing` is the last step of the
    newest window that shows no divergence (0: none). `text` states the figures.
    """

    strength: float
    agreeing: int
    text: str

    @property
    def is_alarm(self) -> bool:
        return self.strength >= 1


class Sign(Protocol):
    """A sign of reward hacking. A pure function of windows."""

    name: str
    quantities: tuple[Quantity, ...]

    def judge(self, windows: Sequence[Window], level: Level) -> SignVerdict:
        """Compares the newest of at least two windows, all with `quantities`, with the earlier ones."""
        ...
