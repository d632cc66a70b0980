"""Finished groups that are lost in the object store, at each moment of their life: none is missing, none comes twice.

A lost object is one whose owner has died: a fetch of it raises what a fetch of an object of a lost node raises.
`test_faults.py` kills real nodes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from small_cluster import PROMPTS_PER_STEP, Shape, SmallRun
from test_faults import expected

from mobula.cluster.records.trajectory import ScoredGroup

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(400)]

NUM_STEPS, RESTORED_AT = 7, 5  # the newest checkpoint is of version 3 then


@ray.remote(num_cpus=0)
class _Owner:
    def put(self) -> list[ray.ObjectRef]:
        return [ray.put(b"x" * 200_000)]


@pytest.fixture
def nowhere(local_ray: str) -> ray.ObjectRef:
    """A reference to what is lost."""
    owner = _Owner.remote()
    [reference] = ray.get(owner.put.remote())
    ray.kill(owner)
    return reference


async def test_groups_lost_before_their_copy_before_their_update_and_after_it_are_made_again(
    tmp_path: Path, nowhere: ray.ObjectRef
) -> None:
    lost: list[str] = []

    async def act(version: int) -> None:
        if version == 0:
            _lose_some_before_their_copy(run, nowhere, lost)
            _lose_some_before_their_score(run, nowhere)
            _lose_some_before_their_update(run, nowhere)
        if version == RESTORED_AT:
            trained = run._learner._trained
            trained[:] = [(made, [replace(group, group=nowhere) for group in groups]) for made, groups in trained]
            assert max(made for made, _ in trained) == RESTORED_AT
            os.kill(run.saboteur.process_id("learner/1"), signal.SIGKILL)

    run = SmallRun(tmp_path, Shape(total_steps=NUM_STEPS, num_engines=1, num_rewards=1), on_version=act)
    assert await run.go() == NUM_STEPS
    assert [sorted(step) for step in run.trained] == [sorted(step) for step in expected(NUM_STEPS)]
    assert run.losses["learner_died"] == 1, run.losses
    assert run.losses["group_LostObjectError"] == len(lost) > 3, "only what no journal has is sampled again"


def _lose_some_before_their_copy(run: SmallRun, nowhere: ray.ObjectRef, lost: list[str]) -> None:
    """The journal cannot have them."""
    reserve = run.replay.reserve

    async def losing(group: ScoredGroup) -> None:
        if run.prompts.index_of(group.summary.group_id) % 5 == 2:
            lost.append(group.summary.group_id)
            group = replace(group, group=nowhere)
        await reserve(group)

    run.replay.reserve = losing


def _lose_some_before_their_score(run: SmallRun, nowhere: ray.ObjectRef) -> None:
    """The journal has them."""
    take = run.replay.take

    async def losing(num_groups: int) -> list[ScoredGroup]:
        first, *others = await take(num_groups)
        return [replace(first, group=nowhere), *others]

    run.replay.take = losing


def _lose_some_before_their_update(run: SmallRun, nowhere: ray.ObjectRef) -> None:
    """The journal has the one, and the reference can score the other again."""
    score = run.reference.score

    async def losing(groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        scored = await score(groups)
        if len(groups) == PROMPTS_PER_STEP:
            scored[1] = replace(scored[1], group=nowhere)
            scored[2] = replace(scored[2], reference_logprobs=nowhere)
        return scored

    run.reference.score = losing
