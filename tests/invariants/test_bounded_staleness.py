"""No trained token is older than max_staleness, whatever the rollouts' timing."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from fakes import NUM_TOKENS, FakeLearner, FakeRollouts, turns
from runs import PooledRollouts, Run

from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.roles import UpdateReport
from mobula.cluster.rollout.staleness import OvertakingOrder, StalenessGate


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
