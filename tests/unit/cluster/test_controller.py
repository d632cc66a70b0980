"""The loop's order, its end, and what a failing collaborator does to it."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from fakes import FakeLearner
from runs import Run

from mobula.cluster.errors import RolloutError, WorkerDiedError
from mobula.cluster.records.trajectory import ScoredGroup
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


async def test_a_released_step_leaves_nothing_in_the_buffer(tmp_path: Path) -> None:
    run = Run(tmp_path, total_steps=2)
    await run.go()
    stats = run.metrics.steps[2].replay
    assert stats is not None
    assert stats.num_taken == 0


async def test_a_finished_run_trains_no_more(tmp_path: Path) -> None:
    await Run(tmp_path, total_steps=2).go()
    again = Run(tmp_path, total_steps=2)
    assert await again.go() == 2
    assert again.learner.trained == []


async def test_a_failing_update_ends_the_run_with_its_own_error(tmp_path: Path) -> None:
    class Broken(FakeLearner):
        async def update(self, groups: Sequence[ScoredGroup]) -> UpdateReport:
            raise FloatingPointError("loss is NaN")

    with pytest.raises(FloatingPointError, match="loss is NaN"):
        await Run(tmp_path, total_steps=2, learner=Broken()).go()


async def test_a_poison_prompt_ends_the_run_while_the_loop_waits_for_groups(tmp_path: Path) -> None:
    def fault(prompt_id: str, attempt: int) -> Exception | None:
        return RolloutError("bad") if "/9/" in prompt_id else None

    run = Run(tmp_path, total_steps=5, fault=fault)
    with pytest.raises(RolloutError, match="prompt 0/9/s9"):
        await asyncio.wait_for(run.go(), 5)


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
