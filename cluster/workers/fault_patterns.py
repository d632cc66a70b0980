"""Detects restart loops: engines that die again and again with the same cause.

Every crash has a fingerprint of the cause. Consecutive deaths with equal fingerprints form a series. A
death without a fingerprint (the process was killed from outside) neither belongs to a series nor ends it. Two patterns
end a series before the restart budget is used up:

    one prompt      it was in flight at each of MIN_DEATHS deaths or more, at the last one with no other prompt
    pushes          MIN_DEATHS engines died one after the other within MAX_PUSHES pushes after their start, at least
                    MIN_AFTER_PUSH of them after a push, and they have no prompt in common

Prompts in flight at every death of a series are suspects. Few suspects run at a time; once few are left, each runs
alone. A suspect is cleared when it finishes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MIN_DEATHS = 3
MAX_PUSHES = 10
MIN_AFTER_PUSH = 2
MAX_ALONE = 4  # up to this number, suspects run alone from the second death on


@dataclass(frozen=True)
class Death:
    """One engine that was lost."""

    fingerprint: str | None  # of the cause; None: the engine was killed from outside, or did not answer
    num_pushes: int  # since the engine's start
    prompt_ids: frozenset[str]  # in flight


@dataclass(frozen=True)
class OnePrompt:
    """Finding: one prompt crashes every engine that samples it."""

    prompt_id: str
    num_deaths: int


@dataclass(frozen=True)
class AfterPushes:
    """Finding: engines crash soon after weight pushes."""

    num_deaths: int


class FaultPatterns:
    """Takes every death in order and classifies the series that the newest one belongs to.

    Example:
        patterns = FaultPatterns()
        for num_in_flight in (9, 3, 1):         # prompts including "0/7/s7"
            finding = patterns.died(Death("RuntimeError|model.py:7", 0, prompts[:num_in_flight]))
        finding                                 # OnePrompt("0/7/s7", num_deaths=3)
    """

    def __init__(self) -> None:
        self._fingerprint: str | None = None
        self._num_early = 0  # deaths in a row of engines that took MAX_PUSHES or fewer
        self._num_after_push = 0  # early deaths in a row after at least one push
        self._num_common = 0  # deaths in a row with a prompt in common
        self._suspects: frozenset[str] = frozenset()

    def died(self, death: Death) -> OnePrompt | AfterPushes | None:
        """Records a death. Returns a finding, if any; its prompt is no longer a suspect."""
        if death.fingerprint is None:
            return None
        if death.fingerprint != self._fingerprint:
            self._fingerprint = death.fingerprint
            self._begin()
        is_early = death.num_pushes <= MAX_PUSHES
        self._num_early = self._num_early + 1 if is_early else 0
        self._num_after_push = self._num_after_push + (death.num_pushes > 0) if is_early else 0
        self._narrow(death.prompt_ids)
        if self._num_common >= MIN_DEATHS and len(death.prompt_ids) == 1:
            [prompt_id] = death.prompt_ids
            finding = OnePrompt(prompt_id, self._num_common)
            self._begin()
            return finding
        is_series = self._num_early >= MIN_DEATHS and self._num_after_push >= MIN_AFTER_PUSH
        if is_series and self._num_common < MIN_DEATHS:
            return AfterPushes(self._num_early)
        return None

    def finished(self, prompt_id: str) -> None:
        """Records that an engine finished the prompt."""
        self._suspects -= {prompt_id}
        if not self._suspects:
            self._clear_suspects()

    def is_suspect(self, prompt_id: str) -> bool:
        """Whether the prompt was in flight at each of two deaths or more of the series."""
        return self._num_common > 1 and prompt_id in self._suspects

    @property
    def max_suspects_in_flight(self) -> int | None:
        """How many suspects may run at a time; None: no limit.

        The second death leaves up to as many suspects as there were prompts in flight. Running their square root at a
        time leaves at most that many after the third death.
        """
        if self._num_common < 2:
            return None
        return 1 if self.run_alone else math.isqrt(len(self._suspects))

    @property
    def run_alone(self) -> bool:
        """Whether suspects run one at a time: a further death then identifies the prompt."""
        return self._num_common > 2 or (self._num_common == 2 and len(self._suspects) <= MAX_ALONE)

    def _narrow(self, in_flight: frozenset[str]) -> None:
        common = self._suspects & in_flight
        if common:
            self._num_common += 1
            self._suspects = common
        else:
            self._num_common = 1
            self._suspects = in_flight

    def _begin(self) -> None:
        """Starts a new series."""
        self._num_early = 0
        self._num_after_push = 0
        self._clear_suspects()

    def _clear_suspects(self) -> None:
        self._num_common = 0
        self._suspects = frozenset()
