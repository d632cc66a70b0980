"""The loop's order, its end, what a failing collaborator does to it, and how it stops when it is asked to."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import FakeEvaluator, FakeLearner, turns
from runs import Run
from waiting import until

from mobula.cluster.errors import RunStopped, WorkerDiedError
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.recovery.checkpoints import newest_learner_state
from mobula.cluster.roles import UpdateReport
from mobula.cluster.workers.supervisor import Supervisor, Watched, watched_pool


async def test_every_step_waits_scores_updates_publishes_evaluates_and_saves_in_this_order(tmp_path: Path) -> None:
    run = Run(tmp_path, total_steps=3)
    assert await run.go() == 3
    assert run.weights.published == [0, 1, 2, 3]
    assert run.evaluator.offered == [0, 1, 2, 3]
    phases = ["wait_for_rollouts", "reference", "update", "evaluation", "weight_sync", "evaluation", "checkpoint"]
    assert {step: scope.phases for step, scope in run.metrics.steps.items()} == dict.fromkeys((1, 2, 3), phases)


async def test_the_learner_gets_whole_steps_with_reference_logprobs(tmp_path: Path) -> None:
    run = Run(tmp_path, total_steps=2, prompts_per_step=4)
    await run.go()
    groups = [group for _, step in run.learner.trained for group in step]
    assert [len(step) for _, step in run.learner.trained] == [4, 4]
    assert all(len(group.reference_logprobs) == group.summary.num_trajectories for group in groups)


async def test_a_failing_update_ends_the_run_with_its_own_error(tmp_path: Path) -> None:
    class Broken(FakeLearner):
        async def update(self, groups: Sequence[ScoredGroup]) -> UpdateReport:
            raise FloatingPointError("loss is NaN")

    with pytest.raises(FloatingPointError, match="loss is NaN"):
        await Run(tmp_path, total_steps=2, learner=Broken()).go()


class Role:
    def __init__(self, name: str, closed: list[str]) -> None:
        self.error: Exception | None = None
        self.is_hung = False
        self._name, self._closed = name, closed

    async def ping(self) -> None:
        if self.is_hung:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error

    async def close(self) -> None:
        self._closed.append(self._name)
        if self.error is not None:
            raise self.error

    def watched(self) -> Watched:
        return Watched(self._name, self.ping, self.close)


def supervise() -> tuple[Supervisor, dict[str, Role], list[str]]:
    closed: list[str] = []
    roles = {name: Role(name, closed) for name in ("replay", "learner", "rollout/1")}
    return Supervisor([r.watched() for r in roles.values()], interval_s=0.005, deadline_s=0.02), roles, closed


async def test_roles_are_closed_last_started_first() -> None:
    supervisor, _, closed = supervise()
    async with supervisor.watching():
        await asyncio.sleep(0.02)
        assert closed == []
    assert closed == ["rollout/1", "learner", "replay"]
    await supervisor.close()
    assert len(closed) == 3, "each is closed once"


async def test_a_dead_role_ends_the_run_and_is_named() -> None:
    supervisor, roles, closed = supervise()
    with pytest.raises(WorkerDiedError, match="learner died: out of memory"):
        async with asyncio.timeout(2), supervisor.watching():
            roles["learner"].error = RuntimeError("out of memory")
            await asyncio.Event().wait()
    assert closed == ["rollout/1", "learner", "replay"], "one that cannot close does not keep the others open"


async def test_a_hung_role_ends_the_run_and_is_named() -> None:
    supervisor, roles, _ = supervise()
    with pytest.raises(WorkerDiedError, match=r"rollout/1 did not answer a ping within 0\.02 s"):
        async with asyncio.timeout(2), supervisor.watching():
            roles["rollout/1"].is_hung = True
            await asyncio.Event().wait()


async def test_the_check_of_a_pool_may_be_late_but_not_fail() -> None:
    error: list[Exception] = []

    async def check() -> None:
        await asyncio.sleep(0.03)
        for failure in error:
            raise failure

    async def close() -> None: ...

    supervisor = Supervisor([watched_pool("reward", check, close)], interval_s=0.005, deadline_s=0.01)
    async with asyncio.timeout(2), supervisor.watching():
        await asyncio.sleep(0.1)
    error.append(RuntimeError("the pool is broken"))
    supervisor = Supervisor([watched_pool("reward", check, close)], interval_s=0.005, deadline_s=0.5)
    with pytest.raises(WorkerDiedError, match="the pool is broken"):
        async with asyncio.timeout(2), supervisor.watching():
            await asyncio.Event().wait()


async def test_failures_of_the_same_moment_are_kept_as_notes() -> None:
    supervisor, roles, _ = supervise()
    with pytest.raises(WorkerDiedError) as caught:
        async with asyncio.timeout(2), supervisor.watching():
            roles["learner"].error = roles["replay"].error = RuntimeError("node lost")
            await asyncio.Event().wait()
    assert "replay died" in str(caught.value)
    assert any("learner died" in note for note in caught.value.__notes__)


# A run that is asked to stop ends with a checkpoint, and goes on from it as if it had never stopped.

STEPS = 4
AT_THE_END = 0  # a checkpoint interval


class HeldLearner(FakeLearner):
    """Updates of one version wait until they are let go."""

    def __init__(self, version: int) -> None:
        super().__init__()
        self.is_updating, self.may_end = asyncio.Event(), asyncio.Event()
        self.num_saves = 0
        self._held = version

    async def update(self, groups: Sequence[ScoredGroup]) -> UpdateReport:
        if self.version + 1 == self._held:
            self.is_updating.set()
            await self.may_end.wait()
        return await super().update(groups)

    async def save(self, folder: Path) -> None:
        self.num_saves += 1
        await super().save(folder)


class HeldEvaluator(FakeEvaluator):
    """The evaluation of one version does not end."""

    def __init__(self, version: int) -> None:
        super().__init__()
        self.is_evaluating = asyncio.Event()
        self._held = version

    async def maybe_run(self, version: int) -> None:
        await super().maybe_run(version)
        if version == self._held:
            self.is_evaluating.set()
            await asyncio.Event().wait()


def endless(*places: int) -> Callable[[str], int]:
    """These prompts are never done."""
    return lambda prompt_id: 10**9 if int(prompt_id.split("/")[1]) in places else 0


def uneven(prompt_id: str) -> int:
    """Some take longer than others."""
    return int(prompt_id.split("/")[1]) * 5 % 7


def a_run(folder: Path, **settings: object) -> Run:
    return Run(folder, **{"total_steps": STEPS, "checkpoint_interval": AT_THE_END, "has_journal": True, **settings})


async def stopped(run: Run, when: Awaitable[object]) -> None:
    """Run until `when`, and ask it to stop then; it does."""
    going = asyncio.ensure_future(run.go())
    await when
    assert run.stop.request()
    with pytest.raises(RunStopped):
        await asyncio.wait_for(going, 5)


def saved(folder: Path) -> int:
    newest = newest_learner_state(folder / "checkpoints")
    assert newest is not None
    return newest[0]


async def whole(folder: Path) -> list[list[str]]:
    """What a run that is not stopped learns from."""
    run = a_run(folder)
    await run.go()
    return run.learner.weights


async def test_a_stop_ends_the_wait_for_rollouts_and_loses_no_finished_group(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a", pauses=endless(5))
    await stopped(run, until(lambda: "0/4/s4" in run.replay._held and run.learner.version == 2))
    assert saved(tmp_path / "a") == 2
    again = a_run(tmp_path / "a")
    assert await again.go() == STEPS
    assert again.recovered == {"steps": 0, "groups": 1}
    assert again.rollouts.attempts["0/4/s4"] == 0
    assert list(again.metrics.steps) == [3, 4]
    assert again.learner.weights == await whole(tmp_path / "b")


async def test_without_a_journal_a_stop_loses_no_step(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a", pauses=endless(5), has_journal=False)
    await stopped(run, until(lambda: run.learner.version == 2 and run.rollouts.num_in_flight == 1))
    again = a_run(tmp_path / "a", has_journal=False)
    assert await again.go() == STEPS
    assert list(again.metrics.steps) == [3, 4]
    assert again.learner.weights == await whole(tmp_path / "b")


async def test_a_stop_lets_the_update_and_its_push_end(tmp_path: Path) -> None:
    learner = HeldLearner(version=2)
    run = a_run(tmp_path / "a", learner=learner)
    going = asyncio.ensure_future(run.go())
    await learner.is_updating.wait()
    assert run.stop.request()
    await turns(20)
    assert not going.done()
    learner.may_end.set()
    with pytest.raises(RunStopped):
        await asyncio.wait_for(going, 5)
    assert run.weights.published == [0, 1, 2] and run.metrics.steps[2].replay is not None
    assert run.evaluator.offered == [0, 1], "an evaluation of the last version is left to the next part"
    assert saved(tmp_path / "a") == 2
    again = a_run(tmp_path / "a")
    assert await again.go() == STEPS
    assert list(again.metrics.steps) == [3, 4] and again.evaluator.offered[0] == 2
    assert again.learner.weights == await whole(tmp_path / "b")


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_wherever_a_stop_comes_nothing_is_repeated_or_lost(max_staleness: int, tmp_path: Path) -> None:
    for num_turns in range(1, 90, 6):
        folder = tmp_path / str(num_turns)
        run = a_run(folder, max_staleness=max_staleness, pauses=uneven)
        going = asyncio.ensure_future(run.go())
        while not run.weights.published:
            await turns(1)
        await turns(num_turns)
        is_stopped = run.stop.request()
        with suppress(RunStopped):
            assert await going == STEPS
        assert is_stopped or num_turns > 45, "it was over"
        reached, held = run.learner.version, set(run.replay._held)
        assert saved(folder) == run.weights.published[-1] == reached
        again = a_run(folder, max_staleness=max_staleness)
        assert await again.go() == STEPS
        assert list(again.metrics.steps) == list(range(reached + 1, STEPS + 1))
        assert again.recovered == {"steps": 0, "groups": len(held)}
        assert not held & again.rollouts.attempts.keys()
        trained = [prompt_id for step in again.learner.weights for prompt_id in step]
        assert len(trained) == len(set(trained)) == 2 * STEPS
        if max_staleness == 0:
            assert sorted(trained) == trained


async def test_a_second_request_is_not_heeded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    learner = HeldLearner(version=2)
    run = a_run(tmp_path, learner=learner)
    going = asyncio.ensure_future(run.go())
    await learner.is_updating.wait()
    with caplog.at_level(logging.WARNING):
        assert run.stop.request()
        assert not run.stop.request()
    going.cancel()  # as the caller does
    with pytest.raises(asyncio.CancelledError):
        await going
    assert saved(tmp_path) == 0
    first, second = (record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    assert first == "stopping: waiting for the update of step 1, then for a checkpoint; ask again to stop at once"
    assert second == "stopping at once, without a checkpoint: was waiting for the update of step 1"


async def test_past_its_deadline_a_stop_leaves_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    learner = HeldLearner(version=2)
    run = a_run(tmp_path, learner=learner, stop_s=0.05)
    await stopped(run, learner.is_updating.wait())
    assert saved(tmp_path) == 0
    reason = "waited 0.05 s for the update of step 1 (timeouts.stop_checkpoint_s)"
    assert caplog.messages[-1] == f"stopping without a checkpoint: {reason}"
    assert not run.stop.request(), "the run is closing: a signal cancels it"
    again = a_run(tmp_path)
    assert await again.go() == STEPS
    assert again.recovered["steps"] == 2, "the journal has what no checkpoint has"


async def test_the_deadline_bounds_the_checkpoint_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class SlowDisk(HeldLearner):
        async def save(self, folder: Path) -> None:
            await super().save(folder)
            if self.version:
                await asyncio.Event().wait()

    learner = SlowDisk(version=2)
    learner.may_end.set()
    run = a_run(tmp_path, learner=learner, stop_s=0.05)
    await stopped(run, learner.is_updating.wait())
    assert learner.version == 2 and saved(tmp_path) == 0
    assert "waited 0.05 s for the checkpoint (timeouts" in caplog.messages[-1]


async def test_a_version_that_is_saved_is_not_saved_again(tmp_path: Path) -> None:
    learner = HeldLearner(version=0)
    run = a_run(tmp_path, learner=learner, checkpoint_interval=1, pauses=endless(5))
    await stopped(run, until(lambda: learner.version == 2 and run.rollouts.num_in_flight == 1))
    assert learner.num_saves == 3 and saved(tmp_path) == 2
    again = HeldLearner(version=0)
    run = a_run(tmp_path, learner=again, pauses=endless(5))
    await stopped(run, until(lambda: run.rollouts.num_in_flight == 1))
    assert again.num_saves == 0, "the run was resumed from a checkpoint of this version"


async def test_before_its_first_step_a_run_has_the_checkpoint_of_version_0_alone(tmp_path: Path) -> None:
    learner = HeldLearner(version=0)
    run = a_run(tmp_path, learner=learner, pauses=endless(0))
    await stopped(run, until(lambda: run.rollouts.num_in_flight > 0))
    assert learner.num_saves == 1 and saved(tmp_path) == 0


async def test_a_request_during_start_up_is_not_heeded(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    found: list[bool] = []
    run.weights.on_announced.append(lambda version: found.append(run.stop.request()) if version == 0 else None)
    assert await run.go() == STEPS
    assert found == [False], "the caller cancels it in its first push"


async def test_a_stop_does_not_wait_for_the_last_evaluation_and_the_next_part_makes_it(tmp_path: Path) -> None:
    evaluator = HeldEvaluator(version=STEPS)
    run = a_run(tmp_path)
    run.controller = replace(run.controller, evaluator=evaluator)
    await stopped(run, evaluator.is_evaluating.wait())
    assert saved(tmp_path) == STEPS and run.num_finished == 0
    assert run.metrics.steps[STEPS].replay is not None
    again = a_run(tmp_path)
    assert await again.go() == STEPS
    assert again.learner.trained == [] and again.evaluator.offered == [STEPS] and again.num_finished == 1


async def test_a_run_that_is_done_before_the_stop_takes_effect_is_done(tmp_path: Path) -> None:
    run = a_run(tmp_path)

    async def ask() -> None:
        assert run.stop.request()
        run.num_finished += 1

    run.checkpoints.finish = ask  # the export, after the last checkpoint
    assert await run.go() == STEPS
