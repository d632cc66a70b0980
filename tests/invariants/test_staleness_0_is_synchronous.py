"""With max_staleness = 0 the loop trains exactly what a plain synchronous loop does, however its parts are delayed."""

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from fakes import SETTINGS, FakeLearner, FakePrompts, make_prompt, make_trajectory
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import Run

from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.trajectory import Generated, Prompt, Reward, ScoredGroup, TrajectoryGroup
from mobula.cluster.roles import SamplingSettings, UpdateReport
from mobula.cluster.runtime.seeds import derived_seed
from mobula.deploy.rehearsal.simulated.machine import run_virtually

STEPS, SIZE = 8, 4
LEARNING_RATE = 1.0
NUM_TOKENS = 4


@dataclass(frozen=True)
class Step:
    """What a step trained on, and the parameter that it left."""

    prompt_ids: list[str]
    tokens: list[list[list[int]]]  # of each group's siblings
    parameter: float


def sample(prompt_id: str, settings: SamplingSettings, parameter: float) -> list[list[int]]:
    """Tokens 0 and 1 from a policy of one parameter, the logit of 1."""
    choice = random.Random(f"{settings.seed}/{prompt_id}")
    chance = 1 / (1 + math.exp(-parameter))
    return [[int(choice.random() < chance) for _ in range(NUM_TOKENS)] for _ in range(settings.num_samples)]


def score(tokens: Sequence[Sequence[int]]) -> list[float]:
    return [sum(sibling) / NUM_TOKENS for sibling in tokens]


def trained(parameter: float, tokens: Sequence[Sequence[Sequence[int]]]) -> float:
    """One policy-gradient step; groups weigh differently by their place, so that their order matters."""
    gradient = 0.0
    for place, siblings in enumerate(tokens, start=1):
        rewards = score(siblings)
        mean = sum(rewards) / len(rewards)
        chance = 1 / (1 + math.exp(-parameter))
        for reward, sibling in zip(rewards, siblings, strict=True):
            gradient += (reward - mean) * sum(token - chance for token in sibling) / place
    return parameter + LEARNING_RATE * gradient / len(tokens)


def plain_synchronous_loop(seed: int, drop_uniform: bool) -> list[Step]:
    """Sample a step's prompts one after the other, train, and only then go on."""
    prompts = FakePrompts(epoch_size=50)
    parameter, index = 0.0, 0
    steps = []
    for _ in range(STEPS):
        ids, tokens = [], []
        while len(ids) < SIZE:
            prompt_id = prompts.id_at(index)
            index += 1
            own_settings = replace(SETTINGS, seed=derived_seed(seed, prompt_id))
            siblings = sample(prompt_id, own_settings, parameter)
            if not (drop_uniform and len(set(score(siblings))) == 1):
                ids.append(prompt_id)
                tokens.append(siblings)
        parameter = trained(parameter, tokens)
        steps.append(Step(ids, tokens, parameter))
    return steps


class OneParameterLearner(FakeLearner):
    def __init__(self) -> None:
        super().__init__(num_turns=0)
        self.parameters = [0.0]  # index: version
        self.steps: list[Step] = []

    async def update(self, groups: Sequence[ScoredGroup]) -> UpdateReport:
        await asyncio.sleep(3.0)
        tokens = [[t.actions.token_ids.tolist() for t in group.group.trajectories] for group in groups]
        self.parameters.append(trained(self.parameters[-1], tokens))
        self.steps.append(Step([group.summary.group_id for group in groups], tokens, self.parameters[-1]))
        return await super().update(groups)


class OneParameterRollouts:
    """Samples with the published version; who asks first may be answered last."""

    def __init__(self, learner: OneParameterLearner, timing: int) -> None:
        self.version = 0
        self._learner = learner
        self._timing = timing

    async def generate(self, prompt: Prompt, settings: SamplingSettings) -> Generated:
        while self.version < settings.min_version:
            await asyncio.sleep(0)
        tokens = sample(prompt.prompt_id, settings, self._learner.parameters[self.version])
        versions = [self.version] * NUM_TOKENS
        await asyncio.sleep(random.Random(f"{self._timing}/{prompt.prompt_id}").lognormvariate(0, 1.5))
        siblings = [
            replace(
                make_trajectory(f"{prompt.prompt_id}#{index}", versions),
                actions=TokenActions(np.array(sibling, dtype=np.int32)),
            )
            for index, sibling in enumerate(tokens)
        ]
        group = TrajectoryGroup(make_prompt(prompt.prompt_id), tuple(siblings))
        return Generated(group, group.summary())


class TokenRewards:
    def __init__(self, timing: int) -> None:
        self._timing = timing

    async def score(self, group: TrajectoryGroup, group_id: str) -> list[Reward]:
        await asyncio.sleep(random.Random(f"{self._timing}:{group.group_id}").expovariate(1.0))
        return [Reward(value) for value in score([t.actions.token_ids.tolist() for t in group.trajectories])]


def steps_of_a_run(*, max_staleness: int, drop_uniform: bool, timing: int) -> list[Step]:
    learner = OneParameterLearner()
    with TemporaryDirectory() as folder:
        run = Run(
            Path(folder), total_steps=STEPS, prompts_per_step=SIZE, max_staleness=max_staleness, max_concurrent=SIZE,
            drop_uniform=drop_uniform, rollouts=OneParameterRollouts(learner, timing), rewards=TokenRewards(timing),
            learner=learner, checkpoint_interval=0,
        )  # fmt: skip
        run_virtually(run.go())
    return learner.steps


@settings(deadline=None)
@given(timing=st.integers(0, 2**32), drop_uniform=st.booleans())
def test_staleness_0_trains_the_ids_tokens_and_curve_of_the_plain_loop(timing: int, drop_uniform: bool) -> None:
    expected = plain_synchronous_loop(SETTINGS.seed, drop_uniform)
    assert steps_of_a_run(max_staleness=0, drop_uniform=drop_uniform, timing=timing) == expected


@pytest.mark.parametrize("drop_uniform", [False, True])
def test_the_comparison_sees_staleness(drop_uniform: bool) -> None:
    expected = plain_synchronous_loop(SETTINGS.seed, drop_uniform)
    assert steps_of_a_run(max_staleness=1, drop_uniform=drop_uniform, timing=0) != expected


def test_the_plain_loop_learns_and_meets_uniform_groups() -> None:
    curve = [step.parameter for step in plain_synchronous_loop(SETTINGS.seed, drop_uniform=False)]
    assert curve[-1] > curve[0] > 0
    assert plain_synchronous_loop(SETTINGS.seed, True) != plain_synchronous_loop(SETTINGS.seed, False)
