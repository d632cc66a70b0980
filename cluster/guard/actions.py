"""Watches of the signs, and what the guard does when one fires."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mobula.cluster.errors import RewardHackingError
from mobula.cluster.guard.signs import Sign
from mobula.cluster.guard.windows import Level, Series, StepValues
from mobula.cluster.metrics.guard_events import GuardEvent


class KLScale:
    """Steps of a factor that is 1 at the start. Which factor makes a version does not depend on when it is asked, so
    repeated steps train as before.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[int, float]] = []  # (first version, factor), ascending

    @property
    def newest(self) -> float:
        return self._steps[-1][1] if self._steps else 1.0

    def at(self, version: int) -> float:
        """The factor for the step that makes `version`."""
        return next((factor for first, factor in reversed(self._steps) if first <= version), 1.0)

    def set_from(self, version: int, factor: float) -> None:
        """Sets the factor of the steps that make `version` and later ones."""
        self._steps = [*(step for step in self._steps if step[0] < version), (version, factor)]

    def state(self) -> list[list[float]]:
        """Returns the state for a checkpoint, as JSON."""
        return [[first, factor] for first, factor in self._steps]

    def restore(self, state: Sequence[Sequence[float]]) -> None:
        self._steps = [(int(first), float(factor)) for first, factor in state]


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


_logger = logging.getLogger(__name__)


class Restorable(Protocol):
    """The learner, whose state a rollback replaces."""

    async def restore(self, folder: Path, version: int) -> None:
        """Loads the learner state in `folder`, which becomes `version`."""
        ...


@dataclass(frozen=True)
class Situation:
    """An alarm, the version made by its step, the newest agreeing version, and the earlier events of the run."""

    alarm: Alarm
    version: int
    agreeing: int
    kl_scale: float
    events: tuple[GuardEvent, ...]

    def event(self, action: str, kl_scale: float, restored: int | None = None) -> GuardEvent:
        alarm = self.alarm
        return GuardEvent(
            self.version, alarm.sign, action, alarm.strength, self.agreeing, alarm.text, kl_scale, restored
        )

    def num_of(self, action: str) -> int:
        return sum(event.action == action for event in self.events)


class GuardAction(Protocol):
    """What happens at an alarm. `severity` orders the actions of several signs: only the highest acts."""

    name: str
    severity: int

    async def act(self, situation: Situation) -> GuardEvent | None:
        """Acts; returns the event to record, None if nothing happens.

        Raises:
            RewardHackingError: the run has to stop.
        """
        ...


class Warn:
    """Records and logs an alarm once, until the sign has agreed again."""

    name, severity = "warn", 1

    async def act(self, situation: Situation) -> GuardEvent | None:
        return situation.event(self.name, situation.kl_scale) if situation.alarm.is_new else None


class RaiseKL:
    """Multiplies the factor of the KL coefficient at each alarm; an alarm after `max_actions` raises stops the run."""

    name, severity = "raise_kl", 2

    def __init__(self, kl_scale: KLScale, *, factor: float, max_actions: int) -> None:
        self._kl_scale = kl_scale
        self._factor = factor
        self._max_actions = max_actions

    async def act(self, situation: Situation) -> GuardEvent | None:
        if situation.num_of(self.name) >= self._max_actions:
            raise RewardHackingError(_stopped(situation, f"after {self._max_actions} raises of the KL coefficient"))
        factor = self._kl_scale.newest * self._factor
        self._kl_scale.set_from(situation.version + 1, factor)
        return situation.event(self.name, factor)


class Rollback:
    """Loads the newest checkpoint whose version agrees; an alarm after `max_actions` rollbacks stops the run."""

    name, severity = "rollback", 3

    def __init__(
        self, learner: Restorable, newest: Callable[[int], tuple[int, Path] | None], *, max_actions: int
    ) -> None:
        """`newest(version)` returns version and learner folder of the newest complete checkpoint up to `version`."""
        self._learner = learner
        self._newest = newest
        self._max_actions = max_actions

    async def act(self, situation: Situation) -> GuardEvent | None:
        if situation.num_of(self.name) >= self._max_actions:
            raise RewardHackingError(_stopped(situation, f"after {self._max_actions} rollbacks"))
        found = await asyncio.to_thread(self._newest, situation.agreeing)
        if found is None:
            raise RewardHackingError(_stopped(situation, "no checkpoint of an agreeing version is left"))
        await self._learner.restore(found[1], situation.version)
        return situation.event(self.name, situation.kl_scale, found[0])

    async def repeat(self, event: GuardEvent) -> None:
        """Loads the checkpoint of a recorded rollback again, for a step that a resume repeats."""
        assert event.restored is not None, "a rollback names its checkpoint"
        found = await asyncio.to_thread(self._newest, event.restored)
        if found is None or found[0] != event.restored:
            raise RewardHackingError(
                f"the rollback of step {event.version} cannot be repeated: its checkpoint of step {event.restored} is "
                "missing or damaged; restore it, or remove the journal folder to resume from the newest checkpoint"
            )
        await self._learner.restore(found[1], event.version)


class Stop:
    """Ends the run with an error."""

    name, severity = "stop", 4

    async def act(self, situation: Situation) -> GuardEvent | None:
        raise RewardHackingError(_stopped(situation, "guard.action is stop"))


def _stopped(situation: Situation, reason: str) -> str:
    return (
        f"step {situation.version}: {situation.alarm.text} (sign {situation.alarm.sign}, {reason}). The newest version "
        f"without this divergence is {situation.agreeing}, see its checkpoints. Change the trained reward "
        "(rewards.components), or go on with guard.action=warn and resume=auto"
    )
