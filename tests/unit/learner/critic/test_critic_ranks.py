"""A critic on its own ranks, and the resume of a critic."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import LocalHandle, by_value
from killed_learner import NUM_STEPS, follow
from learner_data import random_groups, tiny_config, with_reference

from mobula.cluster.errors import CheckpointError, LostObjectError, WorkerDiedError
from mobula.cluster.guard.guard import KLScale
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.roles import UpdateReport
from mobula.configs.load import load_config
from mobula.learner.backends.sharded import saved_tensors
from mobula.learner.critic_ranks import CriticGroup, CriticRank, LearnerWithCritic
from mobula.learner.learner import Learner
from mobula.learner.learner_group import LearnerGroup

WORDS = (
    "algorithm=ppo_gae", "algorithm.kl.coef=0.1", "algorithm.kl.controller=adaptive", "algorithm.kl.horizon=20",
    "algorithm.num_epochs=2", "algorithm.num_minibatches=2", "algorithm.shaping.running_moments=scale",
    "algorithm.max_staleness=4", "algorithm.critic.learning_rate=1e-3", "algorithm.critic.warmup_steps=1",
    "num_steps=6",
)  # fmt: skip


@pytest.fixture(scope="module")
def updates(tokenizer) -> list[list[ScoredGroup]]:
    """Four steps, with log-probs of a reference."""
    steps = (random_groups(tokenizer, 4, 2, seed=seed) for seed in range(4))
    return [[with_reference(g, gap=0.1 * n - 0.2) for n, g in enumerate(groups)] for groups in steps]


def together(folder: Path) -> LearnerGroup:
    config = tiny_config(folder, *WORDS)
    return LearnerGroup(lambda: [LocalHandle(Learner(config, 0, 1, (250,)))], config.timeouts, by_value)


def apart(folder: Path, export: Path) -> LearnerWithCritic:
    config = tiny_config(folder, *WORDS, "algorithm.critic.place=own_ranks")
    critic = CriticGroup(lambda: [LocalHandle(CriticRank(config, 0, 1))], config.timeouts, by_value)
    learner = [LocalHandle(Learner(config, 0, 1, (250,)))]
    return LearnerWithCritic(lambda: learner, config.timeouts, by_value, None, critic=critic, folder=export)


async def trained(group: LearnerGroup, updates: Sequence[list[ScoredGroup]]) -> list[dict[str, float]]:
    return [dict((await group.update(groups)).metrics) for groups in updates]


async def exported(group: LearnerGroup) -> list[bytes]:
    """The weights that engines get."""
    _, buckets = await group.export_weights(1 << 20)
    return [(await bucket.future()).tobytes() for bucket in buckets]


async def test_both_places_train_alike_and_a_checkpoint_of_one_is_one_of_the_other(
    folder: Path, updates: list[list[ScoredGroup]], tmp_path: Path
) -> None:
    near, far = together(folder), apart(folder, tmp_path / "reference")
    for group in (near, far):
        await group.start()
        await group.begin_rl()
    expected, found = await trained(near, updates[:2]), await trained(far, updates[:2])
    assert found == expected
    assert [step["learning_rate"] > 0 for step in found] == [False, True]
    assert found[1]["optimizer_steps"] == 8 and found[1]["value_loss"] > 0
    for group, name in ((near, "near"), (far, "far")):
        await group.save(tmp_path / name)
        assert await group.finish_save()
    expected, found = await trained(near, updates[2:]), await trained(far, updates[2:])
    assert found == expected
    assert len({step["kl_coef"] for step in expected}) == 2, "the critic's ranks follow the coefficient"
    assert await exported(near) == await exported(far)

    for again, state in ((apart(folder, tmp_path / "reference"), "near"), (together(folder), "far")):
        await again.start()
        assert await again.load(tmp_path / state) == 2
        assert await trained(again, updates[2:]) == expected, f"at the other place, from the checkpoint of {state}"


async def test_the_critics_ranks_take_the_raised_factor_of_the_kl_coefficient(
    folder: Path, updates: list[list[ScoredGroup]], tmp_path: Path
) -> None:
    factors, found = [KLScale(), KLScale(), KLScale()], []
    for factor in factors[1:]:
        factor.set_from(2, 3.0)
    groups = (together(folder), together(folder), apart(folder, tmp_path / "reference"))
    for group, factor in zip(groups, factors, strict=True):
        group.scale_kl_with(factor)
        await group.start()
        await group.begin_rl()
        found.append(await trained(group, updates[:3]))
    plain, near, far = found
    assert far == near
    assert far[0] == plain[0] and far[1]["kl_coef"] == pytest.approx(3 * plain[1]["kl_coef"])
    assert far[1]["value_loss"] != plain[1]["value_loss"], "returns have the KL term"


class Rank:
    """A rank of either kind that answers at once, with a state of this version; `update` misses the groups."""

    def __init__(self, version: int = 3) -> None:
        self._version = version

    def update(self, groups: object, version: int, *, values: object = None) -> UpdateReport:
        raise LostObjectError("the groups went with their node")

    def value(self, groups: object, version: int, kl: float | None) -> tuple[int, list]:
        return version, [[np.zeros(2, np.float32)]]

    async def train(self, version: int) -> tuple[dict[str, float], float]:
        await asyncio.sleep(0)
        return {"value_loss": 1.0}, 1.0

    def load(self, folder: Path) -> int:
        return self._version


def faked(critic_version: int = 3) -> LearnerWithCritic:
    timeouts = load_config(["experiment=digits", "algorithm=ppo_gae"]).timeouts
    critic, ranks = CriticGroup(lambda: [LocalHandle(Rank(critic_version))], timeouts, by_value), [LocalHandle(Rank())]
    return LearnerWithCritic(lambda: ranks, timeouts, by_value, None, critic=critic, folder=Path("x"))


async def test_a_critic_that_has_trained_on_what_the_policy_missed_cannot_go_on() -> None:
    """Both go back to a checkpoint; the step then fails before anything has changed."""
    with pytest.raises(WorkerDiedError, match="the critic trains on groups that the policy could not get at"):
        await faked().update([])


async def test_states_of_two_versions_are_no_checkpoint() -> None:
    with pytest.raises(CheckpointError, match="version 3 of the policy and 4 of the critic"):
        await faked(critic_version=4).load(Path("x"))


async def test_both_groups_are_watched_by_their_roles() -> None:
    assert [found.role for found in faked().groups] == ["learner", "critic"]


def finished(model: Path, folder: Path, kill_after: int = 0) -> int:
    """The exit code of a process that follows the steps."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["killed_learner"])
    process = context.Process(target=follow, args=(model, folder, kill_after))
    process.start()
    process.join(600)
    return process.exitcode


@pytest.fixture(scope="module")
def uninterrupted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("uninterrupted")
    assert finished(folder, out) == 0
    return out


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    """Weights and moments of policy and critic at the end."""
    parts = {name: saved_tensors(folder / "end" / name).items() for name in ("", "critic")}
    return {f"{part}/{name}": read() for part, tensors in parts.items() for name, read in tensors}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kill_after", "begun_at"), [(1, 0), (3, 2), pytest.param(4, 4, marks=pytest.mark.exhaustive)])
def test_a_killed_learner_goes_on_bit_for_bit(
    folder: Path, uninterrupted: Path, tmp_path: Path, kill_after: int, begun_at: int
) -> None:
    """LightRFT defect B10: neither optimizers nor the KL controller were saved."""
    assert finished(folder, tmp_path, kill_after) == -signal.SIGKILL
    assert finished(folder, tmp_path) == 0
    found, expected = (torch.load(out / "end.pt") for out in (tmp_path, uninterrupted))
    assert found["begun_at"] == begun_at
    assert found["metrics"] == {v: m for v, m in expected["metrics"].items() if v > begun_at}
    torch.testing.assert_close(state_of(tmp_path), state_of(uninterrupted), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_there_was_something_to_lose(uninterrupted: Path) -> None:
    metrics = torch.load(uninterrupted / "end.pt")["metrics"]
    coefficients = [metrics[version]["kl_coef"] for version in range(1, NUM_STEPS + 1)]
    assert coefficients[0] == coefficients[1] == 0.1, "nothing was observed while the critic trained alone"
    assert len(set(coefficients[1:])) == NUM_STEPS - 1
    assert len({metrics[version]["value_loss"] for version in metrics}) == NUM_STEPS
    assert [metrics[version]["learning_rate"] > 0 for version in metrics] == [False, True, True, True, True]
