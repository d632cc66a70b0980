"""Control of a run's workers, and what their faults have in common."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from handles import LocalHandle, never
from waiting import until

from mobula.cluster.errors import PlacementError, WorkerDiedError
from mobula.cluster.roles import ReplayStats
from mobula.cluster.runtime.vitals import ObjectStoreUse
from mobula.cluster.workers.control import OUTCOMES_KEPT, ControlLoop, ControlPanel
from mobula.cluster.workers.faults import MAX_PUSHES, AfterPushes, Death, FaultPatterns, OnePrompt
from mobula.cluster.workers.status import (
    MAX_WORKERS,
    InFlightSummary,
    Progress,
    RoleOutcome,
    RunStatus,
    ScaleRequest,
    WorkerState,
    WorkerStatus,
)

CAUSE = "RuntimeError|model.py:7"
OTHER = "ValueError|model.py:9"
POISON = "0/7/s7"
MANY = frozenset([POISON, *(f"0/{n}/s{n}" for n in range(100, 163))])


def runs_until_found(patterns: FaultPatterns, in_flight: frozenset[str], *, killers: frozenset[str]) -> list[object]:
    """Engines that die of `killers`: what is found at each death while prompts run as the patterns allow."""
    found: list[object] = []
    finding = None
    while finding is None and len(found) < 20:
        limit = patterns.max_suspects_in_flight
        suspects = [prompt_id for prompt_id in in_flight if patterns.is_suspect(prompt_id)]
        suspects.sort(key=lambda prompt_id: prompt_id not in killers)  # never alone before the patterns single it out
        batch = frozenset(suspects[:limit]) if suspects else in_flight
        if batch & killers:
            finding = patterns.died(Death(CAUSE, 0, batch))
            found.append(finding)
        else:
            for prompt_id in batch:
                patterns.finished(prompt_id)
            in_flight -= batch
    return found


@pytest.mark.parametrize(("num_beside", "num_deaths"), [(0, 3), (1, 3), (3, 3), (7, 4), (63, 4)])
def test_a_prompt_that_ends_every_engine_is_found_within_four_deaths(num_beside: int, num_deaths: int) -> None:
    in_flight = frozenset([POISON, *(f"0/{n}/s{n}" for n in range(100, 100 + num_beside))])
    found = runs_until_found(FaultPatterns(), in_flight, killers=frozenset([POISON]))
    assert found == [None] * (num_deaths - 1) + [OnePrompt(POISON, num_deaths)]


def test_two_prompts_that_end_engines_are_found_one_after_the_other() -> None:
    patterns, killers = FaultPatterns(), frozenset([POISON, "0/150/s150"])
    *_, first = runs_until_found(patterns, MANY, killers=killers)
    *_, second = runs_until_found(patterns, MANY - {first.prompt_id}, killers=killers - {first.prompt_id})
    assert {first.prompt_id, second.prompt_id} == killers


def test_a_prompt_is_not_found_guilty_beside_another_one() -> None:
    patterns = FaultPatterns()
    for _ in range(5):
        assert patterns.died(Death(CAUSE, 0, frozenset([POISON, "0/8/s8"]))) is None
    assert patterns.run_alone


def test_deaths_without_a_prompt_in_common_find_none() -> None:
    patterns = FaultPatterns()
    for n in range(10):
        assert patterns.died(Death(CAUSE, 0, frozenset([f"0/{n}/s"]))) is None
    assert patterns.max_suspects_in_flight is None


def test_suspects_that_all_finish_are_cleared() -> None:
    patterns = FaultPatterns()
    both = frozenset([POISON, "0/8/s8"])
    for _ in range(2):
        patterns.died(Death(CAUSE, 0, both))
    assert all(patterns.is_suspect(prompt_id) for prompt_id in both)
    for prompt_id in both:
        patterns.finished(prompt_id)
    assert patterns.max_suspects_in_flight is None
    assert patterns.died(Death(CAUSE, 0, both)) is None
    assert not patterns.is_suspect(POISON), "one death makes no suspects"


def test_what_is_ended_from_outside_is_no_pattern_and_breaks_none() -> None:
    patterns, alone = FaultPatterns(), frozenset([POISON])
    for _ in range(20):
        assert patterns.died(Death(None, 1, alone)) is None
    assert patterns.died(Death(CAUSE, 0, alone)) is None
    assert patterns.died(Death(CAUSE, 0, alone)) is None
    assert patterns.died(Death(None, 0, alone)) is None
    assert patterns.died(Death(CAUSE, 0, alone)) == OnePrompt(POISON, 3)


def test_another_cause_begins_another_series() -> None:
    patterns, alone = FaultPatterns(), frozenset([POISON])
    causes = [CAUSE, CAUSE, OTHER, CAUSE, CAUSE]
    assert [patterns.died(Death(cause, 1, alone)) for cause in causes] == [None] * 5


def test_engines_that_do_not_outlive_a_push_are_found_at_the_third_one() -> None:
    patterns = FaultPatterns()
    deaths = [Death(CAUSE, 1, frozenset([f"0/{n}/s"])) for n in range(3)]
    assert [patterns.died(death) for death in deaths] == [None, None, AfterPushes(3)]


def test_a_death_between_pushes_belongs_to_the_series() -> None:
    """A prompt that goes on from its known tokens may meet what a push makes others meet."""
    patterns = FaultPatterns()
    deaths = [Death(CAUSE, num, frozenset([f"0/{n}/s"])) for n, num in enumerate([MAX_PUSHES + 1, 1, 0, 1])]
    assert [patterns.died(death) for death in deaths] == [None, None, None, AfterPushes(3)]


def test_engines_that_outlive_some_pushes_are_not_found_nor_those_that_saw_none() -> None:
    patterns = FaultPatterns()
    pushes = [1, 1, MAX_PUSHES + 1, 1, 0, MAX_PUSHES + 1, 0, 0, 0, 1]
    assert [patterns.died(Death(CAUSE, num, frozenset())) for num in pushes] == [None] * len(pushes)


def test_prompts_in_common_that_are_cleared_leave_the_push() -> None:
    patterns, both = FaultPatterns(), frozenset([POISON, "0/8/s8"])
    for _ in range(3):
        assert patterns.died(Death(CAUSE, 1, both)) is None, "one of them may be the cause"
    for prompt_id in both:
        patterns.finished(prompt_id)
    assert patterns.died(Death(CAUSE, 1, frozenset(["0/9/s9"]))) == AfterPushes(4)


def test_a_common_prompt_is_looked_at_before_a_common_push() -> None:
    patterns, alone = FaultPatterns(), frozenset([POISON])
    assert [patterns.died(Death(CAUSE, 1, alone)) for _ in range(3)] == [None, None, OnePrompt(POISON, 3)]


IN_FLIGHT = InFlightSummary(num_prompts=5, oldest_id="0/7/s7", oldest_age_s=2.5)
REPLAY = ReplayStats(num_ready=3, num_taken=2, num_bytes=4096, oldest_age_s=0.5, oldest_id="0/1/s1")


class FakeRole:
    """Accepts any number, or raises."""

    def __init__(self, name: str, num_workers: int, error: Exception | None = None) -> None:
        self.name = name
        self.num_workers = num_workers
        self.error = error

    def status(self) -> list[WorkerStatus]:
        return [WorkerStatus(f"{self.name}/{i}", WorkerState.SERVING, 7, 1, 0) for i in range(self.num_workers)]

    async def scale(self, num_workers: int) -> None:
        if self.error is not None:
            raise self.error
        self.num_workers = num_workers


class PanelHost:
    """Makes panels, and remembers what became of them."""

    def __init__(self, make: Callable[[], Any] = ControlPanel) -> None:
        self.panels: list[Any] = []
        self.ended: list[Any] = []
        self.losses: list[str] = []
        self.statuses: list[RunStatus] = []
        self.scaled: list[tuple[str, int]] = []
        self._make = make

    def spawn(self) -> LocalHandle:
        self.panels.append(self._make())
        return LocalHandle(self.panels[-1])

    async def end(self, panel: LocalHandle) -> None:
        self.ended.append(panel)


async def stats() -> ReplayStats:
    return REPLAY


def control(host: PanelHost, *roles: FakeRole, **changes: Any) -> ControlLoop:
    settings = {
        "spawn_panel": host.spawn,
        "end_panel": host.end,
        "progress": lambda: Progress(step=4, phase="update", seconds=1.5),
        "in_flight": lambda: IN_FLIGHT,
        "replay": stats,
        "roles": {role.name: role for role in roles},
        "ranks": lambda: [WorkerStatus("learner/0", WorkerState.SERVING, 7, 0, 0)],
        "object_store": lambda: ObjectStoreUse(10, 40),
        "earlier_scale": {},
        "has_begun": lambda: True,
        "on_scaled": lambda role, num_workers: host.scaled.append((role, num_workers)),
        "on_panel_lost": host.losses.append,
        "on_status": host.statuses.append,
        "interval_s": 0.001,
        "start_s": 0.2,
        "deadline_s": 0.2,
        "scale_s": 0.2,
    }
    return ControlLoop("digits", 100, **{**settings, **changes})


async def outcome(host: PanelHost, loop: ControlLoop, **wanted: int) -> tuple[RoleOutcome, ...]:
    """What becomes of one request."""
    async with loop.running():
        panel = await until(lambda: host.panels and host.panels[-1])
        return await until(lambda: panel.ask(ScaleRequest("a", wanted)))


async def test_the_newest_status_names_phase_queue_and_workers() -> None:
    host = PanelHost()
    async with control(host, FakeRole("reward", 2), FakeRole("reference", 1)).running():
        status = await until(lambda: host.panels and host.panels[0].status())
    assert (status.run, status.total_steps, status.progress) == ("digits", 100, Progress(4, "update", 1.5))
    assert status.replay == REPLAY
    assert [worker.name for worker in status.workers] == ["reward/0", "reward/1", "reference/0", "learner/0"]
    assert status.object_store == ObjectStoreUse(10, 40)
    assert status.num_panels_lost == 0 and status.driver_pid > 0


async def test_a_loop_that_stood_still_reports_for_how_long() -> None:
    host = PanelHost()
    async with control(host, FakeRole("reward", 1)).running():
        await until(lambda: host.statuses)
        time.sleep(0.4)  # the loop serves nothing meanwhile
        num_before = len(host.statuses)
        await until(lambda: len(host.statuses) > num_before + 2)
    assert max(status.loop_lag_s for status in host.statuses[num_before:]) >= 0.25


async def test_a_request_is_applied_role_by_role_and_seen_in_the_status() -> None:
    host, reward, reference = PanelHost(), FakeRole("reward", 1), FakeRole("reference", 1)
    loop = control(host, reward, reference)
    assert await outcome(host, loop, reward=8, reference=2) == (
        RoleOutcome("reward", 8, ""),
        RoleOutcome("reference", 2, ""),
    )
    assert (reward.num_workers, reference.num_workers) == (8, 2)
    assert host.scaled == [("reward", 8), ("reference", 2)]


async def test_a_run_that_goes_on_is_scaled_as_before_once_it_has_begun_and_a_refusal_is_no_end() -> None:
    host, reward, reference = PanelHost(), FakeRole("reward", 1), FakeRole("reference", 1, PlacementError("no room"))
    has_begun = False
    earlier = {"reference": 4, "reward": 3}
    loop = control(host, reward, reference, earlier_scale=earlier, has_begun=lambda: has_begun)
    async with loop.running():
        await until(lambda: len(host.statuses) > 2)
        assert reward.num_workers == 1
        has_begun = True
        await until(lambda: reward.num_workers == 3)
    assert reference.num_workers == 1 and host.scaled == [("reward", 3)]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("reward=0: at least one"), "reward=0: at least one"),
        (PlacementError("2 more reward workers do not fit"), "2 more reward workers do not fit"),
        (KeyError("bug"), "KeyError: 'bug'; run.log has the traceback"),
    ],
)
async def test_what_a_role_refuses_is_reported_and_the_run_goes_on(error: Exception, message: str) -> None:
    host = PanelHost()
    (refused,) = await outcome(host, control(host, FakeRole("reward", 1, error)), reward=3)
    assert not refused.is_accepted and refused.refusal == message


async def test_a_role_that_the_run_does_not_have_is_refused_with_those_that_it_has() -> None:
    host = PanelHost()
    (refused,) = await outcome(host, control(host, FakeRole("reward", 1)), learner=3)
    assert "no scalable role learner" in refused.refusal and "it has reward" in refused.refusal


async def test_more_workers_than_a_role_may_have_are_refused_before_the_role_is_asked() -> None:
    host, reward, reference = PanelHost(), FakeRole("reward", 1), FakeRole("reference", 1)
    loop = control(host, reward, reference)
    refused, accepted = await outcome(host, loop, reward=MAX_WORKERS + 1, reference=MAX_WORKERS)
    assert refused.refusal == "a role has at most 10000 workers: ask for fewer" and reward.num_workers == 1
    assert accepted.is_accepted and reference.num_workers == MAX_WORKERS


async def test_a_role_that_does_not_answer_is_refused_in_time() -> None:
    class Stuck(FakeRole):
        async def scale(self, num_workers: int) -> None:
            await never()

    host = PanelHost()
    (refused,) = await outcome(host, control(host, Stuck("reward", 1), scale_s=0.02), reward=3)
    assert "did not answer within 0.02 s" in refused.refusal


async def test_a_panel_that_dies_is_counted_and_followed_by_another() -> None:
    class Dying(ControlPanel):
        def exchange(self, *args: Any) -> list[ScaleRequest]:
            raise WorkerDiedError("its process ended")

    panels = iter([Dying, Dying, ControlPanel])
    host = PanelHost(lambda: next(panels)())
    async with control(host, FakeRole("reward", 1)).running():
        status = await until(lambda: len(host.panels) == 3 and host.panels[2].status())
    assert status.num_panels_lost == 2
    assert host.losses == ["WorkerDiedError", "WorkerDiedError"]
    assert len(host.ended) == 3, "dead ones and the last one are ended"


async def test_a_panel_that_hangs_is_replaced_and_nothing_that_was_done_is_forgotten() -> None:
    class Full(ControlPanel):
        """Has a request, and hangs from the second visit on."""

        num_visits = 0

        def exchange(self, status: Any, outcomes: Any) -> Any:
            self.num_visits += 1
            return [ScaleRequest("a", {"reward": 2})] if self.num_visits == 1 else never()

    panels = iter([Full, ControlPanel])
    host, reward = PanelHost(lambda: next(panels)()), FakeRole("reward", 1)
    async with control(host, reward, deadline_s=0.02).running():
        await until(lambda: len(host.panels) == 2 and reward.num_workers == 2)
        assert await until(lambda: host.panels[1].ask(ScaleRequest("a", {"reward": 2})))
    assert host.losses == ["DeadlineError"] and reward.num_workers == 2


async def test_a_panel_that_cannot_be_made_does_not_end_the_run() -> None:
    attempts = iter([ValueError("The name control is already taken"), None])

    def make() -> ControlPanel:
        error = next(attempts)
        if error is not None:
            raise error
        return ControlPanel()

    host = PanelHost(make)
    async with control(host).running():
        await until(lambda: host.panels and host.panels[0].status())
    assert host.losses == ["ValueError"]


async def test_the_start_of_a_panels_process_may_take_longer_than_a_call() -> None:
    class SlowStart(ControlPanel):
        async def exchange(self, status: Any, outcomes: Any) -> Any:
            if self.status() is None:
                await asyncio.sleep(0.1)
            return super().exchange(status, outcomes)

    host = PanelHost(SlowStart)
    async with control(host, start_s=30.0, deadline_s=0.05).running():
        status = await until(lambda: host.panels and host.panels[0].status())
    assert status.num_panels_lost == 0 and host.losses == []


async def test_the_panel_is_ended_with_the_run_even_if_that_fails() -> None:
    host = PanelHost()

    async def fail(panel: Any) -> None:
        raise RuntimeError("cannot be killed")

    with pytest.raises(KeyError):
        async with control(host, end_panel=fail).running():
            await until(lambda: host.panels and host.panels[0].status())
            raise KeyError("the run's own error")


def test_the_panel_keeps_the_newest_outcomes() -> None:
    panel = ControlPanel()
    for index in range(OUTCOMES_KEPT + 5):
        panel.exchange(None, {str(index): (RoleOutcome("reward", index, ""),)})
    assert panel.ask(ScaleRequest("5", {})) == (RoleOutcome("reward", 5, ""),)
    assert panel.ask(ScaleRequest("4", {})) is None


def test_a_request_is_taken_once_however_often_it_is_asked_for() -> None:
    panel, request = ControlPanel(), ScaleRequest("a", {"reward": 2})
    assert panel.ask(request) is panel.ask(request) is None
    assert panel.exchange(None, {}) == [request]
    assert panel.ask(request) is None
    assert panel.exchange(None, {"a": (RoleOutcome("reward", 2, ""),)}) == []
    assert panel.ask(request) == (RoleOutcome("reward", 2, ""),)
