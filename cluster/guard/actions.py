"""Actions: what the guard does at an alarm. One class an action; `guard.action` and `guard.actions` choose."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mobula.cluster.errors import RewardHackingError
from mobula.cluster.guard.kl_scale import KLScale
from mobula.cluster.guard.watch import Alarm
from mobula.cluster.metrics.guard_events import GuardEvent

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
        """Loads the checkpoint of a recorded rollback again, for a step that a resume repeats.

        Raises:
            RewardHackingError: the checkpoint is gone.
        """
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
