"""Watch: runs the signs over the windows of a run, live or recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mobula.cluster.guard.sequential_test import Level
from mobula.cluster.guard.signs import Sign
from mobula.cluster.guard.windows import Series, StepValues


@dataclass(frozen=True)
class Alarm:
    """A sign that fired at `step`. `is_new`: it did not fire at the look before. Other fields as in `SignVerdict`."""

    sign: str
    step: int
    strength: float
    agreeing: int
    text: str
    is_new: bool


@dataclass
class Watch:
    """The windows of a run and the outcome of the newest look. Each complete window is one look of every sign."""

    signs: Sequence[Sign]
    series: Series
    false_alarm_rate: float
    num_looks: int = 0
    agreeing: int = 0  # last step of the newest window that every sign agrees with
    strength: float = 0.0  # largest of the signs, at the newest look
    firing: set[str] = field(default_factory=set)  # signs that fired at the newest look

    def observe(self, values: StepValues) -> list[Alarm]:
        """Adds a step; returns the alarms if it completes a window, the strongest first."""
        if not self.series.add(values):
            return []
        self.num_looks += 1
        alarms, agreeing, strengths = [], [values.step], [0.0]
        for sign in self.signs:
            windows = [w for w in self.series.windows if all(q in w.moments for q in sign.quantities)]
            if len(windows) < 2 or self.num_looks < 2 or windows[-1].last != values.step:
                continue
            verdict = sign.judge(windows, Level(self.false_alarm_rate, self.num_looks))
            strengths.append(verdict.strength)
            agreeing.append(verdict.agreeing)
            if verdict.is_alarm:
                is_new = sign.name not in self.firing
                alarms.append(Alarm(sign.name, values.step, verdict.strength, verdict.agreeing, verdict.text, is_new))
        self.firing = {alarm.sign for alarm in alarms}
        self.agreeing, self.strength = min(agreeing), max(strengths)
        return sorted(alarms, key=lambda alarm: -alarm.strength)

    def cut(self, after: int) -> None:
        """Removes the steps after `after`. The number of looks stays, so the bound on false alarms holds."""
        self.series.cut(after)
        self.agreeing = min(self.agreeing, after)
        self.firing.clear()

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, as JSON."""
        known = {"num_looks": self.num_looks, "agreeing": self.agreeing, "strength": min(self.strength, 1e9)}
        return {**known, "firing": sorted(self.firing), "series": self.series.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.num_looks, self.agreeing, self.strength = state["num_looks"], state["agreeing"], state["strength"]
        self.firing = set(state["firing"])
        self.series.restore(state["series"])


def alarms_of(
    steps: Iterable[StepValues], signs: Sequence[Sign], *, window_steps: int, false_alarm_rate: float
) -> list[Alarm]:
    """Returns all alarms of a recorded run, in order. A pure function of its steps.

    Example:
        alarms_of(map(recorded_values, records), [Divergence(0.2)], window_steps=5, false_alarm_rate=0.01)
    """
    watch = Watch(signs, Series(window_steps), false_alarm_rate)
    return [alarm for values in steps for alarm in watch.observe(values)]
