"""Whatever engines do at whatever moment: the run ends, and has trained on the very prompts of a run without faults."""

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from faulty_engines import Fault, FaultyRollouts, Kind, TimedLearner
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import Run

from mobula.cluster.replay.buffer import DUPLICATE
from mobula.deploy.rehearsal.simulated.machine import VirtualTimeLoop, run_virtually

STEPS, SIZE, ENGINES = 6, 3, 3
RUN_S = 150.0  # about as long as a run without faults takes

faults = st.builds(
    Fault,
    kind=st.sampled_from(Kind),
    engine=st.integers(0, ENGINES - 1),
    at_s=st.floats(0, RUN_S),
    for_s=st.floats(0.01, RUN_S),
)


def finished_run(
    injected: Sequence[Fault], *, max_staleness: int, drop_uniform: bool = False, timing: int = 0
) -> tuple[Run, FaultyRollouts]:
    def values(prompt_id: str) -> tuple[float, float]:
        return (1.0, random.Random(prompt_id).choice([0.0, 1.0]))

    pool = FaultyRollouts(ENGINES, injected, timing)
    with TemporaryDirectory() as folder:
        run = Run(
            Path(folder),
            total_steps=STEPS,
            prompts_per_step=SIZE,
            max_staleness=max_staleness,
            max_concurrent=8,
            max_retries=10_000,  # an engine that is down fails call after call
            drop_uniform=drop_uniform,
            rollouts=pool,
            values=values,
            learner=TimedLearner(seconds=5.0),
            checkpoint_interval=0,
        )
        assert run_virtually(pool.during(run.go())) == STEPS
    return run, pool


@cache
def synchronous_run(*, drop_uniform: bool) -> Run:
    """A run without faults at staleness 0."""
    return finished_run([], max_staleness=0, drop_uniform=drop_uniform)[0]


def trained_ids(run: Run) -> list[str]:
    return [prompt_id for step in run.learner.prompt_ids for prompt_id in step]


def oldest_trained_age(run: Run) -> int:
    return max(version - group.summary.oldest_version for version, groups in run.learner.trained for group in groups)


@settings(deadline=None)
@given(
    injected=st.lists(faults, max_size=12),
    max_staleness=st.integers(0, 4),
    drop_uniform=st.booleans(),
    timing=st.integers(0, 2**32),
)
def test_random_faults_lose_no_prompt_train_none_twice_and_change_none(
    injected: list[Fault], max_staleness: int, drop_uniform: bool, timing: int
) -> None:
    faultless = synchronous_run(drop_uniform=drop_uniform)
    run, _ = finished_run(injected, max_staleness=max_staleness, drop_uniform=drop_uniform, timing=timing)
    trained = trained_ids(run)
    assert sorted(trained) == sorted(trained_ids(faultless))
    assert len(set(trained)) == STEPS * SIZE
    assert oldest_trained_age(run) <= max_staleness
    rejected = run_virtually(run.replay.stats()).num_rejected
    assert rejected.keys() <= {"uniform"}, f"{DUPLICATE}: a group arrived twice; stale: finished work was thrown away"
    assert run.dispatcher.pending() == ()
    assert run.dispatcher.state() == faultless.dispatcher.state(), "the same prompts were rejected, too"


@pytest.mark.parametrize("max_staleness", [0, 4])
@pytest.mark.parametrize(
    ("kind", "noticed"),
    [
        (Kind.DIE, "rollout_died"),
        (Kind.HANG, "rollout_hung"),
        (Kind.SLOW, "LostReplyError"),
        (Kind.LOSE_REPLY, "LostReplyError"),
    ],
)
def test_each_kind_of_fault_is_noticed_and_survived(kind: Kind, noticed: str, max_staleness: int) -> None:
    faultless, _ = finished_run([], max_staleness=max_staleness)
    injected = [Fault(kind, engine, at_s=20.0, for_s=70.0) for engine in range(2)]
    run, pool = finished_run(injected, max_staleness=max_staleness)
    found = pool.failures + pool.losses
    assert found[noticed] > 0, found
    assert sorted(trained_ids(run)) == sorted(trained_ids(faultless))


def test_all_engines_at_fault_at_once_only_take_time() -> None:
    kinds = (Kind.DIE, Kind.HANG)
    injected = [Fault(kind, engine, at_s=30.0, for_s=500.0) for kind in kinds for engine in range(ENGINES)]
    run, pool = finished_run(injected, max_staleness=1)
    assert pool.losses["rollout_died"] > 0
    assert len(set(trained_ids(run))) == STEPS * SIZE


def test_faults_meet_a_run_while_it_lasts() -> None:
    loop = VirtualTimeLoop()
    pool = FaultyRollouts(ENGINES)
    with TemporaryDirectory() as folder:
        run = Run(
            Path(folder), total_steps=STEPS, prompts_per_step=SIZE, max_concurrent=8, rollouts=pool,
            learner=TimedLearner(seconds=5.0), checkpoint_interval=0,
        )  # fmt: skip
        loop.run_until_complete(pool.during(run.go()))
    assert RUN_S / 2 < loop.time() < RUN_S * 2
    loop.close()
