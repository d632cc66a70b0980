"""Every key of `algorithm` changes what one update of the learner does, as in its formula."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_data import (
    cut_off,
    edited,
    group,
    image,
    prompt,
    random_groups,
    tiny_config,
    with_logprobs,
    with_reference,
)
from one_learner import (
    UNCLIPPED,
    Tensors,
    as_sampled,
    connected_learner,
    copied,
    gradient_of,
    largest,
    largest_difference,
    saved,
    scorer_of,
)

from mobula.actors.reference.scorer import ReferenceScorer
from mobula.cluster.errors import CheckpointError
from mobula.cluster.records.trajectory import FinishReason, ScoredGroup
from mobula.configs.overrides import groups as config_groups
from mobula.configs.schema import RunConfig
from mobula.learner.algorithms.policy_losses import POLICY_LOSSES
from mobula.learner.batch import fetch_items
from mobula.learner.credit import Credit
from mobula.learner.learner import Learner
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl
from mobula.learner.rank import ALGORITHM_FILE

BANNED = (250, 251)

TAUGHT = ("algorithm.distillation.teacher=a/teacher",)

REFERENCE = ("algorithm.kl.coef=0.1", "resources.reference.num_workers=1")


@pytest.fixture(scope="module")
def scores(folder, tokenizer) -> list[ScoredGroup]:
    """Six groups as the untrained policy would have sampled them; it is their reference too."""
    return as_sampled(scorer_of(tiny_config(folder), folder, BANNED), random_groups(tokenizer, 6, 4))


def connected(folder: Path, *overrides: str) -> Learner:
    return connected_learner(tiny_config(folder, *overrides), BANNED)


def update(folder: Path, groups: list[ScoredGroup], *overrides: str, version: int = 1) -> tuple[Tensors, dict]:
    """The gradient that one update saw, and its metrics."""
    return gradient_of(connected(folder, UNCLIPPED, *overrides), groups, version)


def drifted(groups: list[ScoredGroup], shift: float) -> list[ScoredGroup]:
    """As if another policy had sampled, whose log-probs differ by `shift` in turn up and down."""

    def moved(logprobs: np.ndarray) -> np.ndarray:
        return logprobs + shift * np.where(np.arange(len(logprobs)) % 2, 1, -1).astype(np.float32)

    return [with_logprobs(g, [moved(t.behavior_logprobs) for t in g.group.trajectories]) for g in groups]


def apart(groups: list[ScoredGroup]) -> list[ScoredGroup]:
    """With a reference whose log-probs are lower by 0.5."""
    return [with_reference(g, gap=0.5) for g in groups]


OF_FLOW_MODELS = ("grpo_guard", "diffusion_nft")  # tests/unit/deploy/test_glyphs.py


PRESETS = [f"algorithm={name}" for name in config_groups()["algorithm"] if name not in OF_FLOW_MODELS]


@pytest.mark.parametrize(
    "word",
    [*PRESETS, "algorithm.loss_aggregation=constant"],  # which no preset has
    ids=lambda word: word.removeprefix("algorithm="),
)
def test_an_algorithm_has_a_gradient_that_does_not_depend_on_the_split(folder, scores, word: str) -> None:
    """LightRFT: `--use_gspo`, `--loss_agg_mode` and others changed nothing; `reinforce++` was an error."""
    words = (word, *(TAUGHT if word == "algorithm=distill" else REFERENCE), "algorithm.pass_k=2")
    with_components = [
        dataclasses.replace(
            g, rewards=tuple(dataclasses.replace(r, components={"accuracy": r.value}) for r in g.rewards)
        )
        for g in drifted(scores, 0.01)
    ]
    words += ("algorithm.num_minibatches=1",)
    small, metrics = update(folder, with_components, *words, "learner.tokens_per_microbatch=60")
    whole, _ = update(folder, with_components, *words, "learner.tokens_per_microbatch=100000")
    assert largest_difference(small, whole) < 2e-6 and largest(whole) > 1e-4
    assert metrics["skipped"] == 0 and math.isfinite(metrics["loss"])


EQUAL_HERE = [("dual_clip", "ppo_clip"), ("gspo", "gspo_token")]  # no ratio above the bound; one advantage a response


def test_every_loss_has_a_gradient_of_its_own(folder, scores) -> None:
    """LightRFT: flags such as `--use_gspo` left the gradient as it was."""
    moved = drifted(scores, 0.3)
    found = {name: update(folder, moved, f"algorithm.loss={name}")[0] for name in POLICY_LOSSES}
    pairs = itertools.combinations(sorted(found), 2)
    assert [(a, b) for a, b in pairs if largest_difference(found[a], found[b]) < 1e-6] == EQUAL_HERE


def test_recomputed_log_probs_take_the_place_of_the_engines(folder, scores) -> None:
    """Against its own log-probs the ratio is 1 whatever the engine's; corrections weigh by the engine's."""
    moved = drifted(scores, 0.3)
    words = ("algorithm.old_logprobs=recomputed",)
    _, metrics = update(folder, moved, *words)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-5) and metrics["clip_fraction"] == 0
    assert metrics["correction_weight"] == 1 and metrics["rejected_fraction"] == 0
    weighing = ("algorithm.correction=tis_token", "algorithm.corrections.tis_token.cap=9")
    _, weighed = update(folder, moved, *words, *weighing)
    steps = [np.arange(t.num_steps) % 2 for g in moved for t in g.group.trajectories]
    expected = np.mean([math.exp(-0.3 if odd else 0.3) for row in steps for odd in row])
    assert weighed["correction_weight"] == pytest.approx(expected, abs=1e-4)
    capped = ("algorithm.correction=icepop", "algorithm.corrections.icepop.high=1.1")
    gradient, rejected = update(folder, moved, *words, *capped)
    assert rejected["rejected_fraction"] == pytest.approx(np.mean([not odd for row in steps for odd in row]))
    assert 0 < largest(gradient)


def test_recomputed_log_probs_are_those_before_the_first_minibatch(folder, scores) -> None:
    words = ("algorithm.num_minibatches=3", "algorithm.num_epochs=2", "algorithm.old_logprobs=recomputed")
    metrics = connected(folder, "learner.learning_rate=1e-4", *words).update(drifted(scores, 0.3), 1).metrics
    assert 1.0001 < metrics["ratio_max"] < 1.25, "later minibatches see a policy that moved, none the engine's"


def test_interpolated_log_probs_depend_on_the_age_of_a_token(folder, scores) -> None:
    words = ("algorithm.max_staleness=4", "algorithm.old_logprobs=interpolated", "algorithm.correction=decoupled")
    moved = drifted(scores, 0.3)  # of version 0
    _, young = update(folder, moved, *words, version=1)
    assert young["ratio_max"] == pytest.approx(math.exp(0.3), abs=1e-3) and young["correction_weight"] == 1
    _, old = update(folder, moved, *words, version=4)  # three versions behind: a quarter of the way is left
    assert old["ratio_max"] == pytest.approx(math.exp(0.3 / 4), abs=1e-3)


def test_epochs_and_minibatches_are_further_optimizer_steps(folder, scores) -> None:
    metrics = connected(folder, "algorithm.num_epochs=3", "algorithm.num_minibatches=2").update(scores, 1).metrics
    assert (metrics["optimizer_steps"], metrics["skipped"]) == (6, 0)
    assert metrics["logprob_gap_max"] < 1e-5, "measured before the first step alone"
    assert metrics["ratio_max"] > 1 + 1e-4, "later minibatches see a policy that moved"


def test_a_truncated_response_leaves_the_loss_and_still_counts(folder, scores) -> None:
    cut = [cut_off(scored) for scored in scores]
    found, metrics = update(folder, cut, "algorithm.overlong_filter=true")
    num = sum(g.summary.num_tokens for g in scores)
    assert metrics["num_tokens"] == num and metrics["filtered_responses"] == 6
    silent = sum(g.group.trajectories[0].num_steps for g in scores)
    assert metrics["without_loss_fraction"] == pytest.approx(silent / num)
    plain, unfiltered = update(folder, cut)
    assert unfiltered["filtered_responses"] == 0 and largest_difference(found, plain) > 1e-5


def test_a_step_of_truncated_responses_alone_is_skipped(folder, scores) -> None:
    """LightRFT defect B3: masks of 0 gave NaN, and the step was taken none the less."""
    cut = [edited(scored, finish_reason=[FinishReason.LENGTH] * 4) for scored in scores]
    learner = connected(folder, "algorithm.overlong_filter=true")
    before = copied(learner)
    report = learner.update(cut, 1)
    assert report.metrics["skipped"] == 1 and report.metrics["loss"] == 0
    assert largest_difference(before, copied(learner)) == 0


def test_only_the_tokens_of_highest_entropy_have_a_policy_loss(folder, scores) -> None:
    """LightRFT: the ratio never reached the trainer. Siblings' first tokens have equal entropies, and stay together."""
    gradient, metrics = update(folder, scores, "algorithm.entropy.top_share=0.2")
    assert 0.6 < metrics["without_loss_fraction"] <= 0.8
    assert 1e-5 < largest(gradient) and largest_difference(gradient, update(folder, scores)[0]) > 1e-5


def test_an_entropy_bonus_raises_the_entropy(folder, tokenizer) -> None:
    groups = [group(prompt(tokenizer, f"p{n}", [image(n)]), [[1, 2], [3]], [1.0, 1.0], n) for n in range(3)]
    after = {}
    for bonus in (0.0, 1.0):
        learner = connected(folder, f"algorithm.entropy.bonus={bonus}", "algorithm.max_staleness=9")
        entropies = [learner.update(groups, version).metrics["entropy"] for version in range(1, 5)]
        after[bonus] = entropies[-1] - entropies[0]
    assert after[0.0] == pytest.approx(0, abs=1e-6), "equal rewards have no gradient of their own"
    assert after[1.0] > 1e-4


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_importance"])
def test_kl_in_the_loss_has_a_gradient_and_in_the_reward_an_advantage(folder, scores, estimator: str) -> None:
    words, groups = (*REFERENCE, f"algorithm.kl.estimator={estimator}"), apart(scores)
    none, _ = update(folder, groups)
    in_loss, metrics = update(folder, groups, *words)
    in_reward, other = update(folder, groups, *words, "algorithm.kl.place=reward")
    assert metrics["kl"] == pytest.approx(other["kl"]) and metrics["kl"] > 0.05
    assert all(largest_difference(*pair) > 1e-5 for pair in itertools.combinations((none, in_loss, in_reward), 2))
    capped, small = update(folder, groups, *words, "algorithm.kl.token_cap=0.01")
    assert small["kl"] == pytest.approx(0.01) and largest_difference(none, capped) < 1e-6, "no gradient beyond the cap"


def test_an_adaptive_coefficient_is_resumed_and_the_run_goes_on_bit_for_bit(folder, scores, tmp_path) -> None:
    """LightRFT defect B10: KL controller and moments began again after a resume."""
    words = (
        *REFERENCE, "algorithm.max_staleness=9", "algorithm.kl.controller=adaptive", "algorithm.kl.target=0.001",
        "algorithm.kl.horizon=100", "algorithm.shaping.running_moments=standardise", "algorithm.num_epochs=2",
        "algorithm.num_minibatches=2",
    )  # fmt: skip
    (first, second), groups = (connected(folder, *words) for _ in range(2)), apart(scores)
    coefficients = [first.update(groups, version).metrics["kl_coef"] for version in (1, 2)]
    assert coefficients[0] == 0.1 and coefficients[1] > 0.1
    assert second.load(saved(first, tmp_path)) == 2
    after, again = (learner.update(groups, 3).metrics for learner in (first, second))
    assert again == after and again["kl_coef"] > coefficients[1]
    assert largest_difference(copied(first), copied(second)) == 0


def test_a_checkpoint_without_the_algorithms_state_is_refused(folder, tmp_path) -> None:
    file = saved(connected(folder), tmp_path) / ALGORITHM_FILE
    assert json.loads(file.read_text())["kl_coef"] == 0
    file.unlink()
    with pytest.raises(CheckpointError, match="algorithm.json is missing"):
        connected(folder).load(tmp_path)


RECIPES = ("grpo", "rloo", "reinforce_pp", "ppo_gae", "cpgd", "dapo", "gspo", "gmpo", "cispo", "distill")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_makes_rewarded_answers_likelier(folder, tokenizer, tmp_path, name: str) -> None:
    """Four steps on answers of the policy before them; the teacher of `distill` finds the good ones likelier."""
    words = (f"algorithm={name}", *(TAUGHT if name == "distill" else REFERENCE[1:]), "learner.warmup_steps=0")
    if name == "rloo":  # the plain policy gradient has no ratio to the older policy
        words += ("algorithm.old_logprobs=recomputed", "algorithm.correction=tis_token")
    sizes = ("algorithm.max_staleness=9", "algorithm.samples_per_prompt=4", "algorithm.num_minibatches=1")
    learner = connected(folder, *words, *sizes)
    learner.begin_rl()
    asked = [prompt(tokenizer, f"p{n}", [image(n)][: n % 2]) for n in range(2)]
    groups = [group(a, [[1, 2], [3, 4], [5, 6], [7, 8]], [1.0, 0.0, 1.0, 0.0], n) for n, a in enumerate(asked)]
    groups = [taught(g) for g in as_sampled(scorer_of(tiny_config(folder), folder, BANNED), groups)]
    for version in range(1, 5):
        learner.update(groups, version)
    learner.export(tmp_path / "after")
    after = scorer_of(tiny_config(folder), tmp_path / "after", BANNED).score(groups)
    gained = [
        (new - old.behavior_logprobs).sum()
        for rows, scored in zip(after, groups, strict=True)
        for new, old in zip(rows, scored.group.trajectories, strict=True)
    ]
    good, bad = gained[0::2], gained[1::2]
    assert np.mean(good) > max(0.0, np.mean(bad)), "clips of a few ten-thousandths stop after the first step"


def taught(scored: ScoredGroup) -> ScoredGroup:
    """With a reference that equals the policy, and finds rewarded answers likelier, as a teacher would."""
    pairs = zip(scored.group.trajectories, scored.rewards, strict=True)
    return dataclasses.replace(
        scored, reference_logprobs=[t.behavior_logprobs + np.float32(r.value - 0.5) for t, r in pairs]
    )


NUM_SAMPLES = 128

DISTILL = ("algorithm=distill", "algorithm.kl.coef=0", "algorithm.max_staleness=9")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("teacher"), seed=1)


def config(folder: Path, teacher: Path, *overrides: str) -> RunConfig:
    return tiny_config(folder, *DISTILL, f"algorithm.distillation.teacher={teacher}", *overrides)


@pytest.mark.parametrize("reward_weight", [0.0, 0.5])
@pytest.mark.parametrize("coef", [1.0, 0.25])
def test_a_token_is_credited_with_the_log_ratio_at_its_own_place(
    folder, teacher, tokenizer, reward_weight: float, coef: float
) -> None:
    rng, groups = np.random.default_rng(7), []
    for g in random_groups(tokenizer, 3, 4):
        rows = [rng.normal(-4, 1, t.num_steps).astype(np.float32) for t in g.group.trajectories]
        groups.append(dataclasses.replace(g, reference_logprobs=rows))
    words = (f"algorithm.distillation.reward_weight={reward_weight}", f"algorithm.distillation.coef={coef}")
    cap = ("algorithm.distillation.token_cap=1.5", "algorithm.advantage=dr_grpo")
    found = Credit(config(folder, teacher, *words, *cap)).assign(fetch_items(groups, 0, 1.0)).groups
    for scored, row in zip(groups, found, strict=True):
        rewards = [reward.value for reward in scored.rewards]
        siblings = zip(rewards, scored.group.trajectories, scored.reference_logprobs, row, strict=True)
        for reward, trajectory, reference, item in siblings:
            ratios = (reference.astype(np.float64) - trajectory.behavior_logprobs).clip(-1.5, 1.5)
            expected = reward_weight * (reward - np.mean(rewards)) + coef * ratios
            np.testing.assert_allclose(item.advantages, expected, atol=1e-5)


def test_as_a_loss_the_teacher_leaves_advantages_to_the_rewards(folder, teacher, tokenizer) -> None:
    groups = apart([group(prompt(tokenizer, "a"), [[1, 2], [3]], [1.0, 0.0])])
    words = ("algorithm.distillation.place=loss", "algorithm.distillation.reward_weight=2")
    credit = Credit(config(folder, teacher, *words, "algorithm.advantage=dr_grpo"))
    [row] = credit.assign(fetch_items(groups, 0, 1.0)).groups
    assert [item.advantages.tolist() for item in row] == [[1.0, 1.0], [-1.0]]


@pytest.mark.parametrize("place", ["advantage", "loss"])
def test_groups_that_no_teacher_has_scored_are_refused(folder, teacher, tokenizer, place: str) -> None:
    learner = connected_learner(config(folder, teacher, f"algorithm.distillation.place={place}"))
    with pytest.raises(
        ValueError, match=r"algorithm\.distillation\.teacher=.* set resources\.reference\.num_workers=1"
    ):
        learner.update(random_groups(tokenizer, 2, 2), 1)


def test_rows_of_a_label_have_the_teacher_of_that_label(folder, teacher, tokenizer, tmp_path: Path) -> None:
    other = write_tiny_qwen2_5_vl(tmp_path / "other", seed=2)
    run = config(folder, teacher, f"algorithm.distillation.teachers={{geometry: '{other}'}}")

    def labelled(n: int, label: str | None) -> ScoredGroup:
        asked = prompt(tokenizer, f"p{n}", [image(n)][: n % 2])
        metadata = {} if label is None else {run.rewards.label_key: label}
        return group(dataclasses.replace(asked, metadata=metadata), [[1, 2, 3], [4 + n]], [0.0, 0.0], n)

    groups = [labelled(n, label) for n, label in enumerate(("geometry", "charts", None, "geometry"))]
    both = ReferenceScorer(run, (), {"geometry": other})
    both.load(teacher)
    found = both.score(groups)
    for folder_of, places in ((other, (0, 3)), (teacher, (1, 2))):
        expected = scorer_of(run, folder_of).score([groups[place] for place in places])
        for place, rows in zip(places, expected, strict=True):
            for ours, theirs in zip(found[place], rows, strict=True):
                np.testing.assert_allclose(ours, theirs, atol=1e-6, rtol=0)
    assert np.abs(found[0][0] - both.score([labelled(0, "charts")])[0][0]).max() > 1e-3


@pytest.mark.parametrize("place", ["advantage", "loss"])
def test_the_policy_approaches_the_distribution_of_its_teacher(folder, teacher, tokenizer, place: str) -> None:
    """No reward takes part: all are equal. The KL is exact, over the whole vocabulary."""
    words = (f"algorithm.distillation.place={place}", "learner.warmup_steps=0", "learner.schedule=constant")
    run = config(folder, teacher, *words, "learner.learning_rate=0.003")
    scorer, learner = scorer_of(run, teacher), connected_learner(run)
    asked, num_tokens, rng = prompt(tokenizer, "a", [image(1)]), len(tokenizer), np.random.default_rng(0)
    # One response for every token: their log-probs are the whole distribution after the prompt.
    every_token = group(asked, [[token] for token in range(num_tokens)], [0.0] * num_tokens)
    [items], goal = fetch_items([every_token], 0, 1.0), np.concatenate(scorer.score_one(every_token)).astype(np.float64)
    assert np.exp(goal).sum() == pytest.approx(1, abs=1e-4)
    divergences = []
    for version in range(1, 13):
        with torch.no_grad():
            policy = learner.steps.forward(items)[0].logprobs[:, 0].double().numpy()
        divergences.append(float((np.exp(policy) * (policy - goal)).sum()))
        tokens = rng.choice(num_tokens, size=NUM_SAMPLES, p=np.exp(policy) / np.exp(policy).sum())
        sampled = with_logprobs(
            group(asked, [[token] for token in tokens], [1.0] * NUM_SAMPLES),
            [np.array([policy[token]], dtype=np.float32) for token in tokens],
        )
        learner.update([dataclasses.replace(sampled, reference_logprobs=scorer.score_one(sampled))], version)
    assert divergences[-1] < 0.5 * divergences[0], divergences
