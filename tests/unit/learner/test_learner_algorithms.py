"""Every key of `algorithm` changes what one update of the learner does, as in its formula."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_data import group, image, prompt, random_groups, tiny_config, with_logprobs
from one_learner import connected_learner

from mobula.actors.reference.scorer import ReferenceScorer
from mobula.cluster.errors import CheckpointError
from mobula.cluster.records.trajectory import FinishReason, Prompt, ScoredGroup, WeightSpan
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

Gradient = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def scores(folder, tokenizer) -> list[ScoredGroup]:
    """Six groups as the untrained policy would have sampled them; it is their reference too."""
    scorer = ReferenceScorer(tiny_config(folder), BANNED)
    scorer.load(folder)
    groups = random_groups(tokenizer, 6, 4)
    scored = zip(groups, scorer.score(groups), strict=True)
    return [dataclasses.replace(with_logprobs(g, s), reference_logprobs=s) for g, s in scored]


def connected(folder: Path, *overrides: str) -> Learner:
    return connected_learner(tiny_config(folder, *overrides), BANNED)


def update(folder: Path, groups: list[ScoredGroup], *overrides: str, version: int = 1) -> tuple[Gradient, dict]:
    """The gradient that one update saw, and its metrics."""
    learner = connected(folder, "learner.max_grad_norm=1000000", *overrides)
    learner._optimizer.zero_grad = lambda: None
    report = learner.update(groups, version)
    gradients = {name: p.grad for name, p in learner._policy.named_parameters()}
    return gradients, dict(report.metrics)


def difference(a: Gradient, b: Gradient) -> float:
    return max((a[name] - b[name]).abs().max().item() for name in a)


def size(gradient: Gradient) -> float:
    return max(g.abs().max().item() for g in gradient.values())


def drifted(groups: list[ScoredGroup], shift: float) -> list[ScoredGroup]:
    """As if another policy had sampled, whose log-probs differ by `shift` in turn up and down."""
    moved = []
    for scored in groups:
        rows = [
            t.behavior_logprobs + shift * np.where(np.arange(t.num_steps) % 2, 1, -1).astype(np.float32)
            for t in scored.group.trajectories
        ]
        moved.append(with_logprobs(scored, rows))
    return moved


def truncated(scored: ScoredGroup, sibling: int) -> ScoredGroup:
    rows = list(scored.group.trajectories)
    rows[sibling] = dataclasses.replace(rows[sibling], finish_reason=FinishReason.LENGTH)
    return dataclasses.replace(scored, group=dataclasses.replace(scored.group, trajectories=tuple(rows)))


OF_FLOW_MODELS = ("grpo_guard", "diffusion_nft")  # tests/unit/deploy/test_glyphs.py


@pytest.mark.parametrize("name", [name for name in config_groups()["algorithm"] if name not in OF_FLOW_MODELS])
def test_an_algorithm_has_a_gradient_that_does_not_depend_on_the_split(folder, scores, name: str) -> None:
    """LightRFT: `--use_gspo`, `--loss_agg_mode` and others changed nothing; `reinforce++` was an error."""
    words = (f"algorithm={name}", *(TAUGHT if name == "distill" else REFERENCE), "algorithm.pass_k=2")
    with_components = [
        dataclasses.replace(
            g, rewards=tuple(dataclasses.replace(r, components={"accuracy": r.value}) for r in g.rewards)
        )
        for g in scores
    ]
    moved = drifted(with_components, 0.01)
    small, metrics = update(folder, moved, *words, "algorithm.num_minibatches=1", "learner.tokens_per_microbatch=60")
    whole, _ = update(folder, moved, *words, "algorithm.num_minibatches=1", "learner.tokens_per_microbatch=100000")
    assert difference(small, whole) < 2e-6 and size(whole) > 1e-4
    assert metrics["skipped"] == 0 and math.isfinite(metrics["loss"])


def test_every_loss_has_a_gradient_of_its_own(folder, scores) -> None:
    """LightRFT: flags such as `--use_gspo` left the gradient as it was."""
    moved = drifted(scores, 0.3)
    found = {name: update(folder, moved, f"algorithm.loss={name}")[0] for name in POLICY_LOSSES}
    names = sorted(found)
    same = [(a, b) for n, a in enumerate(names) for b in names[n + 1 :] if difference(found[a], found[b]) < 1e-6]
    equal_here = [
        ("dual_clip", "ppo_clip"),
        ("gspo", "gspo_token"),
    ]  # no ratio above the bound; one advantage a response
    assert [pair for pair in same if pair not in equal_here] == []


def test_recomputed_log_probs_take_the_place_of_the_engines(folder, scores) -> None:
    """Against its own log-probs the ratio is 1 whatever the engine's; corrections weigh by the engine's."""
    moved = drifted(scores, 0.3)
    words = ("algorithm.old_logprobs=recomputed",)
    _, metrics = update(folder, moved, *words)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-5) and metrics["clip_fraction"] == 0
    assert metrics["correction_weight"] == 1 and metrics["rejected_fraction"] == 0
    _, weighed = update(
        folder, moved, *words, "algorithm.correction=tis_token", "algorithm.corrections.tis_token.cap=9"
    )
    steps = [np.arange(t.num_steps) % 2 for g in moved for t in g.group.trajectories]
    expected = np.mean([math.exp(-0.3 if odd else 0.3) for row in steps for odd in row])
    assert weighed["correction_weight"] == pytest.approx(expected, abs=1e-4)
    capped = ("algorithm.correction=icepop", "algorithm.corrections.icepop.high=1.1")
    gradient, rejected = update(folder, moved, *words, *capped)
    assert rejected["rejected_fraction"] == pytest.approx(np.mean([not odd for row in steps for odd in row]))
    assert 0 < size(gradient)


def test_recomputed_log_probs_are_those_before_the_first_minibatch(folder, scores) -> None:
    words = ("algorithm.num_minibatches=3", "algorithm.num_epochs=2", "algorithm.old_logprobs=recomputed")
    metrics = connected(folder, "learner.learning_rate=1e-4", *words).update(drifted(scores, 0.3), 1).metrics
    assert 1.0001 < metrics["ratio_max"] < 1.25, "later minibatches see a policy that moved, none the engine's"


def test_interpolated_log_probs_depend_on_the_age_of_a_token(folder, scores) -> None:
    aged = []
    for scored in drifted(scores, 0.3):
        rows = [
            dataclasses.replace(t, weight_spans=(WeightSpan(0, 0, t.num_steps),)) for t in scored.group.trajectories
        ]
        aged.append(dataclasses.replace(scored, group=dataclasses.replace(scored.group, trajectories=tuple(rows))))
    words = ("algorithm.max_staleness=4", "algorithm.old_logprobs=interpolated", "algorithm.correction=decoupled")
    _, young = update(folder, aged, *words, version=1)
    assert young["ratio_max"] == pytest.approx(math.exp(0.3), abs=1e-3) and young["correction_weight"] == 1
    _, old = update(folder, aged, *words, version=4)  # three versions behind: a quarter of the way is left
    assert old["ratio_max"] == pytest.approx(math.exp(0.3 / 4), abs=1e-3)


def test_epochs_are_further_optimizer_steps(folder, scores) -> None:
    learner, counts = connected(folder, "algorithm.num_epochs=3", "algorithm.num_minibatches=2"), []
    step = learner._step.on_sum
    learner._step.on_sum = lambda *args: counts.append(1) or step(*args)
    metrics = learner.update(scores, 1).metrics
    assert len(counts) == 6 and metrics["skipped"] == 0
    assert metrics["logprob_gap_max"] < 1e-5, "measured before the first step alone"


def test_several_epochs_are_the_same_in_every_run(folder, scores) -> None:
    runs = [connected(folder, "algorithm.num_epochs=2", "algorithm.num_minibatches=3") for _ in range(2)]
    states = []
    for learner in runs:
        learner.update(scores, 1)
        states.append({name: p.detach().clone() for name, p in learner._policy.named_parameters()})
    assert difference(*states) == 0


def test_a_truncated_response_leaves_the_loss_and_still_counts(folder, scores) -> None:
    cut = [truncated(scored, 0) for scored in scores]
    found, metrics = update(folder, cut, "algorithm.overlong_filter=true")
    num = sum(g.summary.num_tokens for g in scores)
    assert metrics["num_tokens"] == num and metrics["filtered_responses"] == 6
    silent = sum(g.group.trajectories[0].num_steps for g in scores)
    assert metrics["without_loss_fraction"] == pytest.approx(silent / num)
    plain, unfiltered = update(folder, cut)
    assert unfiltered["filtered_responses"] == 0 and difference(found, plain) > 1e-5


def test_a_step_of_truncated_responses_alone_is_skipped(folder, scores) -> None:
    """LightRFT defect B3: masks of 0 gave NaN, and the step was taken none the less."""
    cut = scores
    for sibling in range(4):
        cut = [truncated(scored, sibling) for scored in cut]
    learner = connected(folder, "algorithm.overlong_filter=true")
    before = {name: p.detach().clone() for name, p in learner._policy.named_parameters()}
    report = learner.update(cut, 1)
    assert report.metrics["skipped"] == 1 and report.metrics["loss"] == 0
    assert difference(before, {name: p.detach() for name, p in learner._policy.named_parameters()}) == 0


def test_only_the_tokens_of_highest_entropy_have_a_policy_loss(folder, scores) -> None:
    """LightRFT: the ratio never reached the trainer."""
    gradient, metrics = update(folder, scores, "algorithm.entropy.top_share=0.2")
    assert 0.6 < metrics["without_loss_fraction"] <= 0.8, (
        "siblings' first tokens have equal entropies, and stay together"
    )
    assert 1e-5 < size(gradient) and difference(gradient, update(folder, scores)[0]) > 1e-5


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
    words = (*REFERENCE, f"algorithm.kl.estimator={estimator}")
    apart = [dataclasses.replace(g, reference_logprobs=[r - 0.5 for r in g.reference_logprobs]) for g in scores]
    none, _ = update(folder, apart)
    in_loss, metrics = update(folder, apart, *words)
    in_reward, other = update(folder, apart, *words, "algorithm.kl.place=reward")
    assert metrics["kl"] == pytest.approx(other["kl"]) and metrics["kl"] > 0.05
    assert difference(none, in_loss) > 1e-5 and difference(none, in_reward) > 1e-5
    assert difference(in_loss, in_reward) > 1e-5
    capped, small = update(folder, apart, *words, "algorithm.kl.token_cap=0.01")
    assert small["kl"] == pytest.approx(0.01) and difference(none, capped) < 1e-6, "no gradient beyond the cap"


def test_an_adaptive_coefficient_is_resumed_and_the_run_goes_on_bit_for_bit(folder, scores, tmp_path) -> None:
    """LightRFT defect B10: KL controller and moments began again after a resume."""
    words = (
        *REFERENCE,
        "algorithm.max_staleness=9",
        "algorithm.kl.controller=adaptive",
        "algorithm.kl.target=0.001",
        "algorithm.kl.horizon=100",
        "algorithm.shaping.running_moments=standardise",
        "algorithm.num_epochs=2",
        "algorithm.num_minibatches=2",
    )
    apart = [dataclasses.replace(g, reference_logprobs=[r - 0.5 for r in g.reference_logprobs]) for g in scores]
    first = connected(folder, *words)
    coefficients = [first.update(apart, version).metrics["kl_coef"] for version in (1, 2)]
    assert coefficients[0] == 0.1 and coefficients[1] > 0.1
    first.save(tmp_path / "state")
    first.finish_save()
    after = first.update(apart, 3).metrics
    second = connected(folder, *words)
    assert second.load(tmp_path / "state") == 2
    again = second.update(apart, 3).metrics
    assert again == after and again["kl_coef"] > coefficients[1]
    states = [{name: p.detach() for name, p in one._policy.named_parameters()} for one in (first, second)]
    assert difference(*states) == 0


def test_a_checkpoint_without_the_algorithms_state_is_refused(folder, tmp_path) -> None:
    learner = connected(folder)
    learner.save(tmp_path)
    learner.finish_save()
    assert json.loads((tmp_path / ALGORITHM_FILE).read_text())["kl_coef"] == 0
    (tmp_path / ALGORITHM_FILE).unlink()
    with pytest.raises(CheckpointError, match="algorithm.json is missing"):
        connected(folder).load(tmp_path)


RECIPES = ("grpo", "rloo", "reinforce_pp", "ppo_gae", "cpgd", "dapo", "gspo", "gmpo", "cispo", "distill")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_makes_rewarded_answers_likelier(folder, tokenizer, name: str) -> None:
    """Four steps on answers of the policy before them; the teacher of `distill` finds the good ones likelier."""
    words = (f"algorithm={name}", *(TAUGHT if name == "distill" else REFERENCE[1:]), "learner.warmup_steps=0")
    if name == "rloo":  # the plain policy gradient has no ratio to the older policy
        words += ("algorithm.old_logprobs=recomputed", "algorithm.correction=tis_token")
    sizes = ("algorithm.max_staleness=9", "algorithm.samples_per_prompt=4", "algorithm.num_minibatches=1")
    learner = connected(folder, *words, *sizes)
    learner.begin_rl()
    asked = [prompt(tokenizer, f"p{n}", [image(n)][: n % 2]) for n in range(2)]
    groups = [group(a, [[1, 2], [3, 4], [5, 6], [7, 8]], [1.0, 0.0, 1.0, 0.0], n) for n, a in enumerate(asked)]
    before = logprobs_of(learner, groups)
    behaviour = [with_logprobs(g, rows) for g, rows in zip(groups, before, strict=True)]
    for version in range(1, 5):
        learner.update([taught(g) for g in behaviour], version)
    gained = [
        (a - b).sum()
        for new, old in zip(logprobs_of(learner, groups), before, strict=True)
        for a, b in zip(new, old, strict=True)
    ]
    good, bad = gained[0::2], gained[1::2]
    assert np.mean(good) > max(0.0, np.mean(bad)), "clips of a few ten-thousandths stop after the first step"


def logprobs_of(learner: Learner, groups: list[ScoredGroup]) -> list[list[np.ndarray]]:
    """What the learner's policy gives the tokens of each response."""
    found = []
    for items in fetch_items(groups, 0, 1.0):
        with learner._backend.inference():
            output, _ = learner.steps.forward(items)
        rows = output.logprobs.float().cpu().numpy()
        found.append([row[: item.sequence.num_targets].copy() for row, item in zip(rows, items, strict=True)])
    return found


def taught(scored: ScoredGroup) -> ScoredGroup:
    """With a reference that equals the policy, and finds rewarded answers likelier, as a teacher would."""
    rows = [
        t.behavior_logprobs + np.float32(r.value - 0.5)
        for t, r in zip(scored.group.trajectories, scored.rewards, strict=True)
    ]
    return dataclasses.replace(scored, reference_logprobs=rows)


NUM_SAMPLES = 128

DISTILL = ("algorithm=distill", "algorithm.kl.coef=0", "algorithm.max_staleness=9")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("teacher"), seed=1)


def config(folder: Path, teacher: Path, *overrides: str):
    return tiny_config(folder, *DISTILL, f"algorithm.distillation.teacher={teacher}", *overrides)


def taught_of_learner_distillation(groups: list[ScoredGroup], seed: int = 7) -> list[ScoredGroup]:
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
    groups = taught_of_learner_distillation(random_groups(tokenizer, 3, 4))
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
    groups = taught_of_learner_distillation([group(prompt(tokenizer, "a"), [[1, 2], [3]], [1.0, 0.0])])
    words = (
        "algorithm.distillation.place=loss",
        "algorithm.distillation.reward_weight=2",
        "algorithm.advantage=dr_grpo",
    )
    [row] = Credit(config(folder, teacher, *words)).assign(fetch_items(groups, 0, 1.0)).groups
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
        output, _ = learner.steps.forward(items)
    return output.logprobs[:, 0].double().numpy()


@pytest.mark.parametrize("place", ["advantage", "loss"])
def test_the_policy_approaches_the_distribution_of_its_teacher(folder, teacher, tokenizer, place: str) -> None:
    """No reward takes part: all are equal. The KL is exact, over the whole vocabulary."""
    words = (f"algorithm.distillation.place={place}", "learner.warmup_steps=0", "learner.schedule=constant")
    run = config(folder, teacher, *words, "learner.learning_rate=0.003")
    scorer = ReferenceScorer(run, ())
    scorer.load(teacher)
    learner = connected_learner(run)
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
