"""Distillation through the learner: what tokens are credited with, and that the policy approaches its teacher."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from learner_data import group, image, prompt, random_groups, tiny_config, with_logprobs

from mobula.actors.reference.scorer import ReferenceScorer
from mobula.cluster.records.trajectory import Prompt, ScoredGroup
from mobula.configs.schema import RunConfig
from mobula.learner.batch import fetch_items
from mobula.learner.credit import Credit
from mobula.learner.learner import Learner
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

NUM_SAMPLES = 128
DISTILL = ("algorithm=distill", "algorithm.kl.coef=0", "algorithm.max_staleness=9")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("teacher"), seed=1)


def config(folder: Path, teacher: Path, *overrides: str):
    return tiny_config(folder, *DISTILL, f"algorithm.distillation.teacher={teacher}", *overrides)


def taught(groups: list[ScoredGroup], seed: int = 7) -> list[ScoredGroup]:
    """With teacher log-probs that are arbitrary."""
    rng = np.random.default_rng(seed)
    return [
        dataclasses.replace(
            g,
            reference_logprobs=[rng.normal(-4, 1, t.num_steps).astype(np.float32) for t in g.group.trajectories],
        )
        for g in groups
    ]


@pytest.mark.parametrize("reward_weight", [0.0, 0.5])
@pytest.mark.parametrize("coef", [1.0, 0.25])
def test_a_token_is_credited_with_the_log_ratio_at_its_own_place(
    folder, teacher, tokenizer, reward_weight: float, coef: float
) -> None:
    groups = taught(random_groups(tokenizer, 3, 4))
    words = (f"algorithm.distillation.reward_weight={reward_weight}", f"algorithm.distillation.coef={coef}")
    cap = ("algorithm.distillation.token_cap=1.5", "algorithm.advantage=dr_grpo")
    found = Credit(config(folder, teacher, *words, *cap)).assign(fetch_items(groups, 0, 1.0)).groups
    for scored, row in zip(groups, found, strict=True):
        rewards = [reward.value for reward in scored.rewards]
        mean = sum(rewards) / len(rewards)
        for n, (trajectory, item) in enumerate(zip(scored.group.trajectories, row, strict=True)):
            for t in range(trajectory.num_steps):
                ratio = float(scored.reference_logprobs[n][t]) - float(trajectory.behavior_logprobs[t])
                expected = reward_weight * (rewards[n] - mean) + coef * max(-1.5, min(1.5, ratio))
                assert item.advantages[t] == pytest.approx(expected, abs=1e-5)


def test_as_a_loss_the_teacher_leaves_advantages_to_the_rewards(folder, teacher, tokenizer) -> None:
    groups = taught([group(prompt(tokenizer, "a"), [[1, 2], [3]], [1.0, 0.0])])
    words = (
        "algorithm.distillation.place=loss",
        "algorithm.distillation.reward_weight=2",
        "algorithm.advantage=dr_grpo",
    )
    [row] = Credit(config(folder, teacher, *words)).assign(fetch_items(groups, 0, 1.0)).groups
    assert [item.advantages.tolist() for item in row] == [[1.0, 1.0], [-1.0]]


@pytest.mark.parametrize("place", ["advantage", "loss"])
def test_groups_that_no_teacher_has_scored_are_refused(folder, teacher, tokenizer, place: str) -> None:
    learner = Learner(config(folder, teacher, f"algorithm.distillation.place={place}"), 0, 1, ())
    learner.connect("")
    with pytest.raises(
        ValueError, match=r"algorithm\.distillation\.teacher=.* set resources\.reference\.num_workers=1"
    ):
        learner.update(random_groups(tokenizer, 2, 2), 1)


def test_rows_of_a_label_have_the_teacher_of_that_label(folder, teacher, tokenizer, tmp_path: Path) -> None:
    other = write_tiny_qwen2_5_vl(tmp_path / "other", seed=2)
    run = config(folder, teacher, f"algorithm.distillation.teachers={{geometry: '{other}'}}")
    groups = []
    for n, label in enumerate(("geometry", "charts", None, "geometry")):
        asked = prompt(tokenizer, f"p{n}", [image(n)][: n % 2])
        labelled = dataclasses.replace(asked, metadata={} if label is None else {run.rewards.label_key: label})
        groups.append(group(labelled, [[1, 2, 3], [4 + n]], [0.0, 0.0], n))
    both = ReferenceScorer(run, (), {"geometry": other})
    both.load(teacher)
    found = both.score(groups)
    for folder_of, places in ((other, (0, 3)), (teacher, (1, 2))):
        alone = ReferenceScorer(run, ())
        alone.load(folder_of)
        for place, expected in zip(places, alone.score([groups[place] for place in places]), strict=True):
            for ours, theirs in zip(found[place], expected, strict=True):
                np.testing.assert_allclose(ours, theirs, atol=1e-6, rtol=0)
    assert np.abs(found[0][0] - both.score([replace_label(groups[0], run)])[0][0]).max() > 1e-3


def replace_label(scored: ScoredGroup, run: RunConfig) -> ScoredGroup:
    """The group with a label that has no teacher of its own."""
    asked = dataclasses.replace(scored.group.prompt, metadata={run.rewards.label_key: "charts"})
    return dataclasses.replace(scored, group=dataclasses.replace(scored.group, prompt=asked))


def every_token(asked: Prompt, num_tokens: int) -> ScoredGroup:
    """One response for every token of the vocabulary: its log-probs are the whole distribution after the prompt."""
    return group(asked, [[token] for token in range(num_tokens)], [0.0] * num_tokens)


def distribution(learner: Learner, asked: Prompt, num_tokens: int) -> np.ndarray:
    """float64 [V], log-probs of the learner's policy."""
    [items] = fetch_items([every_token(asked, num_tokens)], 0, 1.0)
    with learner._backend.inference():
        output, _ = learner._forward(items)
    return output.logprobs[:, 0].double().numpy()


@pytest.mark.parametrize("place", ["advantage", "loss"])
def test_the_policy_approaches_the_distribution_of_its_teacher(folder, teacher, tokenizer, place: str) -> None:
    """No reward takes part: all are equal. The KL is exact, over the whole vocabulary."""
    words = (f"algorithm.distillation.place={place}", "learner.warmup_steps=0", "learner.schedule=constant")
    run = config(folder, teacher, *words, "learner.learning_rate=0.003")
    scorer = ReferenceScorer(run, ())
    scorer.load(teacher)
    learner = Learner(run, 0, 1, ())
    learner.connect("")
    asked, num_tokens, rng = prompt(tokenizer, "a", [image(1)]), len(tokenizer), np.random.default_rng(0)
    [whole] = scorer.score([every_token(asked, num_tokens)])
    goal = np.concatenate(whole).astype(np.float64)
    assert np.exp(goal).sum() == pytest.approx(1, abs=1e-4)
    divergences = []
    for version in range(1, 13):
        policy = distribution(learner, asked, num_tokens)
        divergences.append(float((np.exp(policy) * (policy - goal)).sum()))
        tokens = rng.choice(num_tokens, size=NUM_SAMPLES, p=np.exp(policy) / np.exp(policy).sum())
        sampled = with_logprobs(
            group(asked, [[token] for token in tokens], [1.0] * NUM_SAMPLES),
            [np.array([policy[token]], dtype=np.float32) for token in tokens],
        )
        [logprobs] = scorer.score([sampled])
        learner.update([dataclasses.replace(sampled, reference_logprobs=logprobs)], version)
    assert divergences[-1] < 0.5 * divergences[0], divergences
