"""Every prompt is trained on once: while actors fail, while groups are rejected, and across kills and resumes."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import FakeLearner, FakePrompts
from runs import Run

from mobula.cluster.errors import DeadlineError, RolloutError, WorkerDiedError

STEPS, SIZE = 6, 3


class Killed(BaseException):
    """What SIGKILL looks like from inside: nothing catches it, nothing is saved after it."""


def kill_at(version: int) -> Callable[[int], None]:
    def kill(offered: int) -> None:
        if offered == version:
            raise Killed

    return kill


def uneven(prompt_id: str) -> int:
    return random.Random(prompt_id).choice([0, 1, 2, 8, 30])


def first_prompts(num: int) -> list[str]:
    prompts = FakePrompts(epoch_size=50)
    return [prompts.id_at(index) for index in range(num)]


def flat(steps: list[list[str]]) -> list[str]:
    return [prompt_id for step in steps for prompt_id in step]


def handed_out(run: Run) -> list[str]:
    """Ids of the prompts that the dispatcher has taken from the sequence."""
    return [run.prompts.id_at(index) for index in range(run.dispatcher.state()["cursor"])]


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_failing_actors_lose_no_prompt_and_train_none_twice(tmp_path: Path, max_staleness: int) -> None:
    def fault(prompt_id: str, attempt: int) -> Exception | None:
        choice = random.Random(f"{prompt_id}/{attempt}")
        kind = choice.choice([RolloutError, WorkerDiedError, DeadlineError])
        return kind("injected") if choice.random() < 0.5 else None

    run = Run(
        tmp_path, total_steps=STEPS, prompts_per_step=SIZE, max_staleness=max_staleness, max_retries=30,
        pauses=uneven, fault=fault,
    )  # fmt: skip
    await run.go()
    trained = flat(run.learner.prompt_ids)
    assert sorted([*trained, *run.dispatcher.pending()]) == sorted(handed_out(run))
    assert len(set(trained)) == STEPS * SIZE


async def test_rejected_prompts_are_counted_and_all_others_are_trained_on_or_pending(tmp_path: Path) -> None:
    def values(prompt_id: str) -> tuple[float, float]:
        return (1.0, random.Random(prompt_id).choice([0.0, 1.0]))

    run = Run(tmp_path, total_steps=STEPS, prompts_per_step=SIZE, drop_uniform=True, pauses=uneven, values=values)
    await run.go()
    stats = await run.replay.stats()
    fates = STEPS * SIZE + len(run.dispatcher.pending()) + stats.num_rejected["uniform"]
    assert fates == len(handed_out(run))


@pytest.mark.parametrize("killed_at", range(STEPS + 1))
async def test_a_killed_and_resumed_run_trains_on_the_same_prompts_in_the_same_order(
    tmp_path: Path, killed_at: int
) -> None:
    whole = Run(tmp_path / "whole", total_steps=STEPS, prompts_per_step=SIZE, pauses=uneven)
    await whole.go()
    assert flat(whole.learner.prompt_ids) == first_prompts(STEPS * SIZE)

    killed = Run(
        tmp_path / "killed", total_steps=STEPS, prompts_per_step=SIZE, pauses=uneven, on_version=kill_at(killed_at)
    )
    with pytest.raises(Killed):
        await killed.go()
    resumed = Run(tmp_path / "killed", total_steps=STEPS, prompts_per_step=SIZE, pauses=uneven)
    assert await resumed.go() == STEPS
    saved = max(0, killed_at - 1)  # step `killed_at` was trained but not saved: it is trained again from `saved`
    assert killed.learner.prompt_ids[:saved] + resumed.learner.prompt_ids == whole.learner.prompt_ids
    assert (killed.num_prepared, resumed.num_prepared) == (1, 0), "the warm start is done once"


@pytest.mark.parametrize("max_staleness", [1, 3])
async def test_a_run_killed_again_and_again_loses_no_prompt(tmp_path: Path, max_staleness: int) -> None:
    trained: list[list[str]] = []
    for killed_at in range(2, STEPS + 2):
        run = Run(
            tmp_path, total_steps=STEPS, prompts_per_step=SIZE, max_staleness=max_staleness, pauses=uneven,
            on_version=kill_at(killed_at), learner=FakeLearner(num_turns=100),
        )  # fmt: skip
        if killed_at <= STEPS:
            with pytest.raises(Killed):
                await run.go()
            trained += run.learner.prompt_ids[:-1]  # the last step was not saved
        else:
            await run.go()
            trained += run.learner.prompt_ids
    known = flat(trained)
    assert len(known) == len(set(known)) == STEPS * SIZE
    handed_out = first_prompts(len(known) + len(run.dispatcher.pending()))
    assert sorted([*known, *run.dispatcher.pending()]) == sorted(handed_out)
