"""StalenessGate, StepOrder and AgeLimit: bound the age of trained groups.

The gate decides how many groups may start, the order which finished groups make up the next step, and the limit which
groups are too old for it. Gate and order make the staleness bound hard without discarding finished work: the gate never
admits more groups than the steps within the bound can hold, and the order never leaves a group for a step in which it
would be over-age. Groups still get over-age if stragglers may be overtaken, or if a group holds tokens from before a
fault: the learner masks or reweights the old tokens, and the limit tests whether any token is left to train.
The classes only count groups; they hold no prompts, no tensors and no clock.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Group = TypeVar("Group")


@dataclass(frozen=True, order=True)
class Admission:
    """One slot of the gate. No token of its group is older than `version`. Admissions sort by version, then by number
    (the order in which prompts were handed out)."""

    version: int  # of the gate when the group started
    number: int


class StalenessGate:
    """Decides how many groups may start now.

    With B groups per step and `version` the newest published weights (or announced weights, if groups can wait for
    their push), after AReaL (Fu et al. 2025):

        capacity = min(max_concurrent - running, (max_staleness + version + 1) * B - (accepted + running))

    `accepted` counts every group that was ever finished and kept, so the second term bounds how far rollouts run ahead
    of training; `max_staleness = 0` admits exactly the groups of the next step. The first factor is at most
    `total_steps`: nothing is sampled for steps after the last. A rejected group frees its slot. After a resume
    `accepted` is `version * B` plus the finished groups; groups that were in flight start again.
    """

    def __init__(self, *, prompts_per_step: int, max_staleness: int, max_concurrent: int, total_steps: int) -> None:
        self.prompts_per_step = prompts_per_step
        self.max_staleness = max_staleness
        self.version = 0
        self.num_accepted = 0
        self._max_concurrent = max_concurrent
        self._total_steps = total_steps
        self._num_started = 0
        self._running: dict[int, Admission] = {}
        self._running_by_version: Counter[int] = Counter()
        self._changed = asyncio.Event()

    @property
    def running(self) -> Sequence[Admission]:
        """Groups in flight, oldest first."""
        return tuple(self._running.values())

    @property
    def running_by_version(self) -> Mapping[int, int]:
        """Version at admission -> number of groups in flight."""
        return self._running_by_version

    @property
    def capacity(self) -> int:
        """How many groups may start now; 0 or less means none."""
        running = len(self._running)
        num_steps = min(self.max_staleness + self.version + 1, self._total_steps)
        ahead = num_steps * self.prompts_per_step - (self.num_accepted + running)
        return min(self._max_concurrent - running, ahead)

    async def wait_for_slot(self) -> None:
        """Waits until a group may start. Call `start` before the next await, or another task may take the slot."""
        while self.capacity <= 0:
            self._changed.clear()
            await self._changed.wait()

    def start(self, number: int | None = None) -> Admission:
        """Takes a slot. `number` is the number that a prompt had before a resume."""
        assert self.capacity > 0, f"a group started with capacity {self.capacity}"
        if number is None:
            number = self._num_started
            self._num_started += 1
        admission = self._running[number] = Admission(self.version, number)
        self._running_by_version[admission.version] += 1
        return admission

    def accept(self, admission: Admission) -> None:
        self._end(admission)
        self.num_accepted += 1

    def reject(self, admission: Admission) -> None:
        self._end(admission)

    def drop(self) -> None:
        """Called when an accepted group is discarded: frees its slot."""
        self.num_accepted -= 1
        self._changed.set()

    def advance(self, version: int) -> None:
        assert version >= self.version, f"published version {version} after {self.version}"
        self.version = version
        self._changed.set()

    def resume(self, version: int, *, num_finished: int = 0, num_started: int = 0) -> None:
        """Begins at `version`: all groups of earlier steps are trained and none is in flight. `num_finished` groups of
        later steps are finished. New groups get numbers from `num_started` on."""
        assert not self._running, f"resumed with {len(self._running)} groups in flight"
        self.advance(version)
        self.num_accepted = version * self.prompts_per_step + num_finished
        self._num_started = num_started

    def _end(self, admission: Admission) -> None:
        del self._running[admission.number]
        self._running_by_version[admission.version] -= 1
        if not self._running_by_version[admission.version]:
            del self._running_by_version[admission.version]
        self._changed.set()


@dataclass(frozen=True)
class AgeLimit:
    """Decides which groups a step drops. Step s trains from version s, so a token of version v has the age s - v.

    Example: with `max_age` 2, step 5 masks tokens of version 2 and drops a group without newer tokens.
    """

    max_age: int  # of a trained token, in versions
    is_whole: bool = False  # drop the group as soon as one token is too old

    def drops(self, tokens_by_version: Mapping[int, int], step: int) -> bool:
        """Whether `step` drops a group with these tokens (version -> number)."""
        decisive = min(tokens_by_version) if self.is_whole else max(tokens_by_version)
        return decisive < step - self.max_age


class StepOrder(Generic[Group]):
    """Puts accepted groups into steps, so that no group is older than `max_staleness` when its step trains.

    Step s trains from version s, so a group admitted at version v is due in step v + max_staleness. A step takes the
    oldest finished groups. It waits for a slower group only if that group would otherwise be late: the remaining
    groups, in order of admission, must fit into the later steps, B per step. The gate's formula guarantees that the
    plain order of admission is such a plan, so the wait always ends. This also holds after a resume: finished groups
    keep the version of their admission, and groups that were in flight are admitted again. The order does not wait if
    only finished groups are late: waiting would not make them younger.

    Example, B = 1 and max_staleness = 1: groups 0 and 1 start at version 0 and are due in step 1. If 1 finishes first
    it becomes step 0, and step 1 waits for 0 though group 2 may be finished.
    """

    def __init__(self, gate: StalenessGate) -> None:
        self.next_step = 0
        self._gate = gate
        self._num_finished = 0
        self._finished: dict[int, list[tuple[int, Group]]] = {}  # version -> heap of (number, group)

    def add(self, admission: Admission, group: Group) -> None:
        self._num_finished += 1
        heapq.heappush(self._finished.setdefault(admission.version, []), (admission.number, group))

    def pop_step(self) -> list[Group]:
        """Returns the groups of the next step in order of admission, or none while it is not complete.

        The cost grows with the number of versions in flight, not with the number of groups.
        """
        size = self._gate.prompts_per_step
        if self._num_finished < size or self._makes_late():
            return []
        self.next_step += 1
        return [self._pop_oldest() for _ in range(size)]

    def remove(self, is_too_old: Callable[[Group], bool], *, below: int = 0) -> list[Group]:
        """Removes and returns the groups that match `is_too_old`. Groups that are young at admission, and not of a
        version below `below`, are not tested."""
        removed: list[Group] = []
        oldest = max(self.next_step - self._gate.max_staleness, below)
        for version in [v for v in self._finished if v < oldest]:
            heap = self._finished.pop(version)
            removed += [group for _, group in heap if is_too_old(group)]
            kept = [entry for entry in heap if not is_too_old(entry[1])]
            if kept:
                heapq.heapify(kept)
                self._finished[version] = kept
        self._num_finished -= len(removed)
        return removed

    def resume(self, version: int) -> None:
        self.next_step = version

    def _makes_late(self) -> bool:
        """Whether the groups left by the next step would not fit into the later steps: for some version v, more than
        B * (v + max_staleness - next_step) groups of v and older would be left, and one of them is still in flight."""
        size, bound = self._gate.prompts_per_step, self._gate.max_staleness
        running = self._gate.running_by_version
        to_take, num_left, num_running = size, 0, 0
        # Oldest first: the next step takes the oldest groups, so a younger version cannot make room for an older one.
        for version in sorted(self._finished.keys() | running.keys()):
            num_finished = len(self._finished.get(version, ()))
            num_taken = min(to_take, num_finished)
            to_take -= num_taken
            num_running += running.get(version, 0)
            num_left += num_finished - num_taken + running.get(version, 0)
            if num_running and num_left > size * (version + bound - self.next_step):
                return True
        return False

    def _pop_oldest(self) -> Group:
        version = min(self._finished)
        _, group = heapq.heappop(self._finished[version])
        if not self._finished[version]:
            del self._finished[version]
        self._num_finished -= 1
        return group


class OvertakingOrder(StepOrder[Group]):
    """Never waits for a slow group while enough others are finished. A late group trains the tokens that are still
    young enough.

    Example, B = 1 and max_staleness = 1: groups 0 and 1 start at version 0. If 1 finishes first it becomes step 0; if 2
    is next it becomes step 1. Group 0 becomes step 2 at the earliest, in which its tokens of version 0 are over-age.
    """

    def _makes_late(self) -> bool:
        return False
