"""No trained token is older than max_staleness, whatever the timing; with 0 the loop is a plain synchronous one."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from fakes import NUM_TOKENS, SETTINGS, FakeLearner, FakePrompts, FakeRollouts, make_prompt, make_trajectory, turns
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import PooledRollouts, Run

from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.trajectory import Generated, Prompt, Reward, ScoredGroup, TrajectoryGroup
from mobula.cluster.roles import SamplingSettings, UpdateReport
from mobula.cluster.rollout.staleness import OvertakingOrder, StalenessGate
from mobula.cluster.runtime.seeds import derived_seed
from mobula.deploy.rehearsal.simulated.machine import run_virtually


def uneven(seed: int) -> Callable[[str], int]:
    """Most groups are quick, some take many times as long."""
    return lambda prompt_id: random.Random(f"{seed}/{prompt_id}").choice([0, 1, 2, 3, 10, 60])


def tokens_by_lag(run: Run) -> Counter[int]:
    lags: Counter[int] = Counter()
    for version, groups in run.learner.trained:
        for group in groups:
            for sampled_by, num_tokens in group.summary.tokens_by_version.items():
                lags[version - sampled_by] += num_tokens
    return lags


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("drop_uniform", [False, True])
async def test_no_token_is_over_the_bound(tmp_path: Path, seed: int, max_staleness: int, drop_uniform: bool) -> None:
    def values(prompt_id: str) -> tuple[float, float]:
        return (1.0, random.Random(f"{seed}:{prompt_id}").choice([0.0, 1.0]))

    run = Run(
        tmp_path, total_steps=12, prompts_per_step=3, max_staleness=max_staleness, pauses=uneven(seed), values=values,
        drop_uniform=drop_uniform, checkpoint_interval=0,
    )  # fmt: skip
    await run.go()
    lags = tokens_by_lag(run)
    assert min(lags) >= 0
    assert max(lags) <= max_staleness
    assert (await run.replay.stats()).num_rejected.keys() <= {"uniform"}, "no finished work is thrown away as stale"


class Stragglers(FakeRollouts):
    """One group in twenty gets its last token two versions after its first one, or with the run's last version."""

    def __init__(self, last_version: int) -> None:
        super().__init__(lambda prompt_id: 1)
        self._last_version = last_version

    async def _pause(self, prompt_id: str, versions: Sequence[int]) -> None:
        if len(versions) == NUM_TOKENS - 1 and random.Random(prompt_id).random() < 0.05:
            async with asyncio.timeout(30):
                while self.version < min(versions[0] + 2, self._last_version):
                    await turns(1)
        await super()._pause(prompt_id, versions)


@pytest.mark.parametrize("drops_whole", [False, True])
async def test_overtaken_groups_are_trained_while_a_token_is_young_enough(tmp_path: Path, drops_whole: bool) -> None:
    run = Run(
        tmp_path, total_steps=30, prompts_per_step=3, max_staleness=1,
        rollouts=PooledRollouts(Stragglers(last_version=29)), order=OvertakingOrder, drops_whole=drops_whole,
        has_journal=True, checkpoint_interval=0,
    )  # fmt: skip
    await run.go()
    for version, groups in run.learner.trained:
        assert len(groups) == 3
        for group in groups:
            decisive = min if drops_whole else max
            assert version - decisive(group.summary.tokens_by_version) <= 1
    trained = [group.summary.group_id for _, groups in run.learner.trained for group in groups]
    dropped = [outcome.group_id for outcome, reason in run.rejected if reason == "over_age"]
    assert (max(tokens_by_lag(run)) > 1) != drops_whole, "overtaken groups have over-age tokens"
    assert bool(dropped) == drops_whole, "as long as a group has a young token it is kept"
    assert sum((await run.replay.stats()).num_rejected.values()) == len(dropped)
    assert len(set(trained)) == len(trained) == 90 and not set(trained) & set(dropped)
    settled = {run.prompts.id_at(index) for index in range(len(trained) + len(dropped))}
    assert settled <= {*trained, *dropped, *run.dispatcher.pending()}, "no prompt is lost"
    assert (await run.replay.stats()).num_bytes == 0, "what was dropped takes no room"


class SlowLearner(FakeLearner):
    """Updates only once a group of a later step is under way, as a learner that is slower than its rollouts would."""

    def follow(self, gate: StalenessGate, *, last_version: int) -> None:
        self._gate = gate
        self._last_version = last_version

    async def update(self, groups: Sequence[ScoredGroup]) -> UpdateReport:
        gate = self._gate
        is_last = gate.version == self._last_version  # there is no later step to run ahead to
        async with asyncio.timeout(30):
            while not is_last and gate.num_accepted + len(gate.running) <= (gate.version + 1) * gate.prompts_per_step:
                await asyncio.sleep(0)
        return await super().update(groups)


async def test_with_staleness_1_rollouts_run_ahead_of_a_slow_learner(tmp_path: Path) -> None:
    learner = SlowLearner()
    run = Run(tmp_path, total_steps=2, max_staleness=1, learner=learner)
    learner.follow(run.gate, last_version=1)
    await run.go()
    assert set(tokens_by_lag(run)) == {0, 1}


# With staleness 0 the loop trains exactly what a plain synchronous loop does, however its parts are delayed.

STEPS, SIZE = 8, 4
LEARNING_RATE = 1.0
LENGTH = 4


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
    return [[int(choice.random() < chance) for _ in range(LENGTH)] for _ in range(settings.num_samples)]


def score(tokens: Sequence[Sequence[int]]) -> list[float]:
    return [sum(sibling) / LENGTH for sibling in tokens]


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
        versions = [self.version] * LENGTH
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
