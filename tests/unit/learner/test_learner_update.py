"""The learner on one process: exact under any split, exact after a resume, and safe where there is nothing to learn."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import LocalHandle
from learner_data import add_dropout, group, image, prompt, random_groups, tiny_config, with_logprobs
from one_learner import connected_learner, copied, largest_difference
from taught import at_hand

from mobula.actors.reference.scorer import ReferenceScorer
from mobula.cluster.errors import CheckpointError, LostObjectError, WrongGroupError
from mobula.cluster.guard.guard import KLScale
from mobula.cluster.records.actions import KeptSets, TokenActions
from mobula.cluster.records.trajectory import FinishReason, Prompt, ScoredGroup, Trajectory, TrajectoryGroup, WeightSpan
from mobula.configs.schema import LearnerConfig, RunConfig
from mobula.learner.backends import sharded
from mobula.learner.batch import fetch_items
from mobula.learner.credit import Credit
from mobula.learner.examples import Example
from mobula.learner.learner_group import LearnerGroup
from mobula.learner.optim import learning_rate
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

BANNED = (250, 251)
connected = partial(connected_learner, banned_ids=BANNED)


def scored_by(config: RunConfig, folder: Path, groups: list[ScoredGroup]) -> list[list[np.ndarray]]:
    scorer = ReferenceScorer(config, BANNED)
    scorer.load(folder)
    return scorer.score(groups)


def sampled(config: RunConfig, folder: Path, groups: list[ScoredGroup]) -> list[ScoredGroup]:
    """The groups as if the untrained policy had sampled them; it is their reference too."""
    scores = scored_by(config, folder, groups)
    return [dataclasses.replace(with_logprobs(g, s), reference_logprobs=s) for g, s in zip(groups, scores, strict=True)]


def by_value(value: object) -> object:
    return value


def asked(tokenizer, n: int) -> Prompt:
    return prompt(tokenizer, f"e{n}", [image(n)][: n % 2], f"What is {n}?")


def examples(tokenizer, num: int) -> list[Example]:
    answers = [np.array([*tokenizer.encode(str(n % 10)), tokenizer.eos_token_id], dtype=np.int32) for n in range(num)]
    return [
        Example.of_answer(asked(tokenizer, n), TokenActions(answer), answer >= 0) for n, answer in enumerate(answers)
    ]


def test_at_step_zero_the_ratio_is_one_and_gap_and_kl_are_zero(folder, tokenizer) -> None:
    config = tiny_config(folder, "algorithm.kl.coef=0.1", "resources.reference.num_workers=1")
    groups = sampled(config, folder, random_groups(tokenizer, 6, 4))
    metrics = connected(config).update(groups, 1).metrics
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["kl"] == pytest.approx(0, abs=1e-8)
    assert metrics["logprob_gap_max"] < 1e-5
    assert metrics["clip_fraction"] == 0
    lengths = [t.num_steps for g in groups for t in g.group.trajectories]
    assert metrics["response_length"] == pytest.approx(np.mean(lengths))
    assert metrics["num_tokens"] == sum(g.summary.num_tokens for g in groups)


def test_the_updates_that_the_configuration_names_are_profiled(folder, tokenizer, tmp_path: Path) -> None:
    config = tiny_config(folder, "tracing.profile_steps=[2]", f"folder={tmp_path}")
    groups = sampled(config, folder, random_groups(tokenizer, 2, 2))
    learner = connected(config)
    for version in (1, 2):
        learner.update(groups, version)
    assert [path.name for path in (config.run_folder / "traces").iterdir()] == ["update-000002-rank-0.json"]


def cut(groups: list[ScoredGroup], num_ids: int) -> list[ScoredGroup]:
    """The same groups as if each token had been sampled among itself and about a tenth of the vocabulary."""
    rng = np.random.default_rng(3)

    def with_sets(trajectory: Trajectory) -> Trajectory:
        is_kept = rng.random((trajectory.num_steps, num_ids)) < 0.1
        is_kept[np.arange(trajectory.num_steps), trajectory.actions.token_ids] = True
        return dataclasses.replace(
            trajectory, actions=dataclasses.replace(trajectory.actions, kept=KeptSets.of(is_kept))
        )

    def of(group: TrajectoryGroup) -> TrajectoryGroup:
        return dataclasses.replace(group, trajectories=tuple(map(with_sets, group.trajectories)))

    return [dataclasses.replace(scored, group=of(scored.group)) for scored in groups]


def test_sampling_replay_and_fire_keep_the_ratio_at_one_and_the_kl_at_zero(folder, tokenizer) -> None:
    """Reference scorer and learner take the softmax over the kept set, at the temperature of the token's place."""
    words = ("algorithm.kl.coef=0.1", "sampler.top_k=20", "sampler.first_token_temperature=4.0")
    plain = random_groups(tokenizer, 6, 4)
    groups = sampled(tiny_config(folder, *words), folder, cut(plain, len(tokenizer)))
    metrics = connected(tiny_config(folder, *words)).update(groups, 1).metrics
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["kl"] == pytest.approx(0, abs=1e-8)
    assert metrics["logprob_gap_max"] < 1e-5
    other = connected(tiny_config(folder, "algorithm.kl.coef=0.1", "sampler.top_k=20")).update(groups, 1).metrics
    assert other["logprob_gap_max"] > 0.1, "at the regular temperature the first token is of another distribution"


def test_a_step_of_text_alone_trains_every_sibling_with_its_own_reward(folder, tokenizer, tmp_path) -> None:
    """LightRFT defect B4: without images prompts and references were not repeated for the siblings, and the text
    trainers did not run at all."""
    answers = [[1, 2], [3], [4, 5, 6], [7, 8]]
    rewards = [[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 1.0, 1.0]]  # of the same answers
    texts = ("What is 1 + 1?", "Name a colour of the flag.", "yes or no")
    asked = [prompt(tokenizer, f"0/{n}/t", text=text) for n, text in enumerate(texts)]
    groups = [group(p, answers, values, seed=n) for n, (p, values) in enumerate(zip(asked, rewards, strict=True))]
    config = tiny_config(folder, "learner.learning_rate=1e-4", "learner.warmup_steps=0")
    learner = connected(config)
    before = scored_by(config, folder, groups)
    metrics = learner.update(sampled(config, folder, groups), 1).metrics
    assert metrics["num_tokens"] == 24 and metrics["response_length"] == 2
    learner.export(tmp_path / "after")
    after = scored_by(config, tmp_path / "after", groups)
    rises = [[float((b - a).sum()) > 0 for a, b in zip(*both, strict=True)] for both in zip(before, after, strict=True)]
    assert rises == [[reward > 0 for reward in values] for values in rewards]


def test_log_probs_of_passes_without_a_gradient_have_no_dropout(tmp_path, tokenizer) -> None:
    """LightRFT defect B21: scoring passes ran in training mode. What is trained has its dropout."""
    folder = add_dropout(write_tiny_qwen2_5_vl(tmp_path / "dropout", seed=0))
    words = ("algorithm.old_logprobs=recomputed", "policy.attention=eager", "learner.tokens_per_microbatch=100000")
    words += ("policy.dropout=true", "supervision.on_logprob_gap=warn", "learner.packing=false")
    learner = connected(tiny_config(folder, *words))
    items = fetch_items(random_groups(tokenizer, 3, 4), 0, 1.0)
    once, again = ([item for row in learner.steps.scored(items) for item in row] for _ in range(2))
    for a, b in zip(once, again, strict=True):
        np.testing.assert_array_equal(a.old_logprobs, b.old_logprobs)
        [[alone]] = learner.steps.scored([[dataclasses.replace(a, old_logprobs=None)]])
        np.testing.assert_allclose(alone.old_logprobs, a.old_logprobs, atol=1e-5)
    asked = prompt(tokenizer, "a", [image(1)])
    assert np.array_equal(learner.sequence_logprobs(asked), learner.sequence_logprobs(asked))
    drawn = [learner.steps.forward(once)[0].logprobs for _ in range(2)]
    assert not torch.equal(*drawn)


def test_no_learning_rate_leaves_every_weight_as_it_was(folder, tokenizer) -> None:
    config = tiny_config(folder)
    learner = connected(config.model_copy(update={"learner": config.learner.model_copy(update={"learning_rate": 0.0})}))
    before = copied(learner)
    learner.update(random_groups(tokenizer, 3, 4), 1)
    assert largest_difference(before, copied(learner)) == 0


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum_token_norm", "constant"])
def test_any_split_into_microbatches_gives_the_same_gradient(folder, tokenizer, aggregation) -> None:
    overrides = (f"algorithm.loss_aggregation={aggregation}", "learner.max_grad_norm=1000000")
    groups = sampled(tiny_config(folder), folder, random_groups(tokenizer, 6, 4))
    gradients = []
    for tokens in (30, 150, 100_000):
        learner = connected(tiny_config(folder, *overrides, f"learner.tokens_per_microbatch={tokens}"))
        learner._optimizer.zero_grad = lambda: None  # keep what this one step saw
        report = learner.update(groups, 1)
        gradients.append({name: p.grad for name, p in learner._policy.named_parameters()})
        assert report.metrics["grad_norm"] > 1e-3
    for other in gradients[1:]:
        assert largest_difference(gradients[0], other) < 1e-6


@pytest.mark.parametrize("tokens", [30, 150, 100_000])
def test_siblings_that_compute_their_prompt_once_have_the_same_gradient(folder, tokenizer, tokens: int) -> None:
    groups = sampled(tiny_config(folder, "learner.packing=false"), folder, random_groups(tokenizer, 6, 4))
    words = ("learner.packing=true", f"learner.tokens_per_microbatch={tokens}", "learner.max_grad_norm=1000000")
    metrics, gradients = [], []
    for shares in ("true", "false"):
        learner = connected(tiny_config(folder, *words, f"learner.share_prompts={shares}"))
        learner._optimizer.zero_grad = lambda: None  # keep what this one step saw
        metrics.append(learner.update(groups, 1).metrics)
        gradients.append({name: p.grad for name, p in learner._policy.named_parameters()})
    assert largest_difference(*gradients) < 1e-6
    share = metrics[0].pop("shared_prompt_share")
    assert metrics[0] == pytest.approx(metrics[1], abs=1e-6, rel=1e-4)
    prompts = [scored.summary.num_prompt_tokens for scored in groups]
    if tokens == 100_000:
        assert share >= 3 * sum(prompts) / (4 * sum(prompts) + sum(scored.summary.num_tokens for scored in groups))
    else:
        assert share > 0.1


def test_minibatches_are_several_steps_on_whole_groups(folder, tokenizer) -> None:
    groups = sampled(tiny_config(folder), folder, random_groups(tokenizer, 6, 4))
    metrics = connected(tiny_config(folder, "algorithm.num_minibatches=3")).update(groups, 1).metrics
    assert metrics["logprob_gap_max"] < 1e-5  # measured before the first step
    assert metrics["ratio_max"] > 1 + 1e-4  # later minibatches see a policy that moved


def sampled_at(scored: ScoredGroup, spans: list[tuple[WeightSpan, ...]]) -> ScoredGroup:
    trajectories = tuple(
        dataclasses.replace(t, weight_spans=s) for t, s in zip(scored.group.trajectories, spans, strict=True)
    )
    whole = dataclasses.replace(scored.group, trajectories=trajectories)
    return dataclasses.replace(scored, group=whole, summary=dataclasses.replace(whole.summary(), sha256=""))


def policy_gradient(folder: Path, groups: list[ScoredGroup], version: int, *overrides: str):
    """Gradient and metrics of the update that makes `version`."""
    learner = connected(tiny_config(folder, "learner.max_grad_norm=1000000", *overrides))
    learner._optimizer.zero_grad = lambda: None  # keep what this one step saw
    report = learner.update(groups, version)
    return {name: p.grad for name, p in learner._policy.named_parameters()}, report.metrics


def test_the_gap_is_of_current_tokens_and_the_drift_of_older_ones(folder, tokenizer) -> None:
    asked = prompt(tokenizer, "a", [image(1)])
    [whole] = sampled(tiny_config(folder), folder, [group(asked, [[5, 6, 7, 8], [9, 1]], [1.0, 0.0])])
    aged = sampled_at(whole, [(WeightSpan(4, 0, 2), WeightSpan(5, 2, 4)), (WeightSpan(5, 0, 2),)])
    first, second = aged.group.trajectories
    moved = dataclasses.replace(first, behavior_logprobs=first.behavior_logprobs + np.float32([0.5, 0.25, 0, 0]))
    aged = dataclasses.replace(aged, group=dataclasses.replace(aged.group, trajectories=(moved, second)))
    _, metrics = policy_gradient(folder, [aged], 6, "algorithm.max_staleness=1")
    assert metrics["logprob_gap_max"] < 1e-5 and metrics["logprob_gap_mean"] < 1e-5
    assert metrics["logprob_drift_mean"] == pytest.approx(0.375, abs=1e-5)
    _, metrics = policy_gradient(folder, [aged], 7, "algorithm.max_staleness=2")
    assert "logprob_gap_mean" not in metrics and "logprob_gap_max" not in metrics, "no token is current"
    assert metrics["logprob_drift_mean"] == pytest.approx(0.75 / 6, abs=1e-5)


def test_a_masked_token_has_no_part_in_the_gradient_but_counts_in_the_mean(folder, tokenizer) -> None:
    asked = prompt(tokenizer, "a", [image(1)])
    [whole] = sampled(tiny_config(folder), folder, [group(asked, [[5, 6, 7, 8], [9, 1]], [1.0, 0.0])])
    spans = [(WeightSpan(3, 0, 2), WeightSpan(5, 2, 4)), (WeightSpan(5, 0, 2),)]
    aged = sampled_at(whole, spans)
    found, metrics = policy_gradient(folder, [aged], 6, "algorithm.max_staleness=1")
    assert metrics["over_age_tokens"] == 2 and metrics["num_tokens"] == 6
    first = aged.group.trajectories[0]
    masked = dataclasses.replace(first, action_mask=np.array([False, False, True, True]))
    by_hand = dataclasses.replace(whole.group, trajectories=(masked, whole.group.trajectories[1]))
    expected, _ = policy_gradient(folder, [dataclasses.replace(whole, group=by_hand)], 1)
    assert largest_difference(found, {name: g * 4 / 6 for name, g in expected.items()}) < 1e-6
    assert max(g.abs().max() for g in found.values()) > 1e-4


def test_a_reweighted_token_keeps_a_gradient_where_the_clip_takes_it_away(folder, tokenizer) -> None:
    asked = prompt(tokenizer, "a")
    [on_policy] = sampled(tiny_config(folder), folder, [group(asked, [[5, 6], [9, 1]], [1.0, 0.0])])
    drifted = [t.behavior_logprobs - shift for t, shift in zip(on_policy.group.trajectories, (1.0, -1.0), strict=True)]
    old = sampled_at(with_logprobs(on_policy, drifted), [(WeightSpan(0, 0, 2),)] * 2)
    within = ("algorithm.max_staleness=2",)
    reweighted = ("algorithm.max_staleness=1", "algorithm.over_age.action=reweight")
    clipped, _ = policy_gradient(folder, [old], 3, *within)
    found, metrics = policy_gradient(folder, [old], 3, *reweighted)
    assert max(g.abs().max() for g in clipped.values()) == 0, "both ratios are beyond the clip"
    assert metrics["over_age_tokens"] == 4 and max(g.abs().max() for g in found.values()) > 1e-4
    beyond = [*reweighted, "algorithm.over_age.reweighted_versions=1"]
    masked, _ = policy_gradient(folder, [old], 4, *beyond)
    assert max(g.abs().max() for g in masked.values()) == 0


def test_training_makes_rewarded_answers_likelier(folder, tokenizer) -> None:
    config = tiny_config(folder)
    asked = prompt(tokenizer, "a", [image(1)])
    [groups] = [sampled(config, folder, [group(asked, [[1, 2], [3, 4]], [1.0, 0.0])])]
    learner = connected(config)
    learner.update(groups, 1)
    before = groups[0].reference_logprobs
    learner.export(folder.parent / "trained")
    after = scored_by(config, folder.parent / "trained", groups)[0]
    assert after[0].sum() > before[0].sum() and after[1].sum() < before[1].sum()


def test_a_sampled_eos_is_trained_and_a_truncated_answer_is_left_as_it_is(tokenizer) -> None:
    eos = tokenizer.eos_token_id
    scored = group(prompt(tokenizer, "a"), [[7, eos], [7, 8]], [1.0, 0.0])
    cut = dataclasses.replace(scored.group.trajectories[1], finish_reason=FinishReason.LENGTH)
    whole = dataclasses.replace(scored.group, trajectories=(scored.group.trajectories[0], cut))
    [[stopped, truncated]] = fetch_items([dataclasses.replace(scored, group=whole)], 0, 1.0)
    assert stopped.sequence.token_ids[-2:].tolist() == [7, eos] and stopped.loss_mask.tolist() == [True, True]
    assert truncated.sequence.token_ids[-2:].tolist() == [7, 8] and truncated.loss_mask.tolist() == [True, True]


def test_a_response_without_a_reward_is_not_trained_and_not_compared(folder, tokenizer) -> None:
    fetched = fetch_items([group(prompt(tokenizer, "a"), [[1], [2], [3]], [1.0, None, 0.0])], 0, 1.0)
    [items] = Credit(tiny_config(folder, "algorithm=dr_grpo")).assign(fetched).groups
    assert [item.advantages.tolist() for item in items] == [[0.5], [0.0], [-0.5]]
    assert [item.num_trained for item in items] == [1, 0, 1]


def test_a_step_with_nothing_to_train_is_counted_and_moves_nothing(folder, tokenizer) -> None:
    learner = connected(tiny_config(folder))
    before = copied(learner)
    report = learner.update([group(prompt(tokenizer, "a"), [[1], [2]], [None, None])], 1)
    assert report.metrics["skipped"] == 1 and report.metrics["loss"] == 0 and report.version == 1
    assert largest_difference(before, copied(learner)) == 0


def test_a_gradient_that_is_not_finite_is_counted_and_moves_nothing(folder, tokenizer) -> None:
    learner = connected(tiny_config(folder))
    before = copied(learner)
    report = learner.update([group(prompt(tokenizer, "a"), [[1], [2]], [math.inf, 0.0])], 1)
    assert report.metrics["skipped"] == 1
    assert largest_difference(before, copied(learner)) == 0


def test_kl_without_reference_log_probs_names_the_key(folder, tokenizer) -> None:
    learner = connected(tiny_config(folder, "algorithm.kl.coef=0.1", "resources.reference.num_workers=1"))
    with pytest.raises(ValueError, match="resources.reference.num_workers"):
        learner.update(random_groups(tokenizer, 1, 2), 1)


@pytest.mark.parametrize("max_copy_bytes", [sharded.MAX_COPY_BYTES, 0])
def test_a_resumed_learner_goes_on_bit_for_bit(folder, tokenizer, tmp_path, monkeypatch, max_copy_bytes) -> None:
    """From a copy that is written while training goes on, and from a large state that is written without a copy."""
    monkeypatch.setattr(sharded, "MAX_COPY_BYTES", max_copy_bytes)
    steps = [random_groups(tokenizer, 3, 4, seed) for seed in range(3)]
    first = connected(tiny_config(folder))
    first.update(steps[0], 1)
    first.update(steps[1], 2)
    first.save(tmp_path / "state")
    assert max_copy_bytes or (tmp_path / "state" / "state.json").is_file(), "it is on disk before the next step"
    first.update(steps[2], 3)
    first.finish_save()
    second = connected(tiny_config(folder))
    assert second.load(tmp_path / "state") == 2
    second.update(steps[2], 3)
    assert largest_difference(copied(first), copied(second)) == 0


def test_an_incomplete_checkpoint_is_refused(folder, tmp_path) -> None:
    with pytest.raises(CheckpointError, match="no complete learner state"):
        connected(tiny_config(folder)).load(tmp_path)


def test_supervised_steps_teach_the_answers(folder, tokenizer) -> None:
    learner = connected(tiny_config(folder, "warm_start.learning_rate=0.003"))
    rows = examples(tokenizer, 4)
    assert learner.answer_accuracy(at_hand(rows)) == 0
    losses = [learner.supervised_step(at_hand(rows))["loss"] for _ in range(40)]
    assert losses[0] == pytest.approx(math.log(len(tokenizer)), rel=0.2) and losses[-1] < 0.1
    assert learner.answer_accuracy(at_hand(rows)) == 1


def test_a_supervised_batch_with_nothing_to_train_has_loss_zero(folder, tokenizer) -> None:
    learner = connected(tiny_config(folder))
    before = copied(learner)
    metrics = learner.supervised_step(at_hand([row.untrained() for row in examples(tokenizer, 2)]))
    assert metrics["loss"] == 0 and metrics["skipped"] == 1
    assert largest_difference(before, copied(learner)) == 0


def test_supervised_loss_is_the_mean_cross_entropy_of_answers_alone(folder, tokenizer) -> None:
    learner = connected(tiny_config(folder))
    rows = examples(tokenizer, 2)
    answers = []
    for n, row in enumerate(rows):
        [answer] = row.candidates
        whole = dataclasses.replace(asked(tokenizer, n), expanded_ids=answer.sequence.token_ids)
        answers += learner.sequence_logprobs(whole)[row.num_prompt_tokens - 1 :].tolist()
    assert learner.supervised_step(at_hand(rows))["loss"] == pytest.approx(-np.mean(answers), abs=1e-5)


def schedule(name: str, warmup_steps: int) -> LearnerConfig:
    return LearnerConfig.model_construct(learning_rate=1.0, warmup_steps=warmup_steps, schedule=name)


def test_learning_rate_rises_and_falls_as_configured() -> None:
    assert [learning_rate(schedule("constant", 4), step, 10) for step in (0, 1, 3, 4, 9)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert [learning_rate(schedule("linear", 0), step, 4) for step in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert learning_rate(schedule("cosine", 0), 2, 4) == pytest.approx(0.5)
    assert learning_rate(schedule("cosine", 0), 4, 4) == pytest.approx(0.0)


def older(scored: ScoredGroup) -> ScoredGroup:
    """The group as if the version before had sampled it."""

    def of(trajectory: Trajectory) -> Trajectory:
        spans = tuple(dataclasses.replace(span, version=span.version - 1) for span in trajectory.weight_spans)
        return dataclasses.replace(trajectory, weight_spans=spans)

    group = dataclasses.replace(scored.group, trajectories=tuple(map(of, scored.group.trajectories)))
    return dataclasses.replace(scored, group=group, summary=group.summary())


@pytest.mark.parametrize("words", [(), ("algorithm.num_minibatches=2", "algorithm.num_epochs=2")])
def test_a_step_of_older_tokens_is_measured_on_fresh_ones_before_the_weights_move(folder, tokenizer, words) -> None:
    config = tiny_config(folder, "learner.learning_rate=0.01", *words)
    current = sampled(config, folder, random_groups(tokenizer, 6, 4))
    learner = connected(config)
    fresh = current[0].group
    plain = learner.update([older(group) for group in current], 1)
    assert "logprob_gap_mean" not in plain.metrics
    metrics = connected(config).update([older(group) for group in current], 1, fresh=[fresh]).metrics
    assert metrics["logprob_gap_mean"] <= metrics["logprob_gap_max"] < 1e-5
    assert {name: metrics[name] for name in plain.metrics} == plain.metrics, "the step itself is the same"


def test_fresh_tokens_of_other_weights_are_found(folder, tokenizer) -> None:
    """What an engine with a stale tensor samples, or one with a penalty, differs from what the learner computes."""
    config = tiny_config(folder)
    current = sampled(config, folder, random_groups(tokenizer, 6, 4))
    fresh = current[0].group
    off = [dataclasses.replace(t, behavior_logprobs=t.behavior_logprobs + 0.25) for t in fresh.trajectories]
    learner = connected(config)
    stale = dataclasses.replace(fresh, trajectories=tuple(off))
    metrics = learner.update([older(group) for group in current], 1, fresh=[stale]).metrics
    assert metrics["logprob_gap_mean"] == pytest.approx(0.25, abs=1e-5)


def test_fresh_samples_that_are_lost_leave_a_step_without_a_gap(
    folder, tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(folder)
    current = sampled(config, folder, random_groups(tokenizer, 6, 4))
    learner = connected(config)

    def lost(references: list[str], **options: object) -> None:
        raise LostObjectError(references[0])

    monkeypatch.setattr("mobula.learner.measures.fetch_or_miss", lost)
    report = learner.update([older(group) for group in current], 1, fresh=["lost"])
    assert report.version == 1 and "logprob_gap_mean" not in report.metrics


@pytest.mark.parametrize("place", ["loss", "reward"])
async def test_a_raised_kl_factor_trains_as_the_higher_coefficient_from_its_version_on(
    folder, tokenizer, place: str
) -> None:
    words = ("resources.reference.num_workers=1", f"algorithm.kl.place={place}", "algorithm.max_staleness=3")
    groups = [
        dataclasses.replace(g, reference_logprobs=[t.behavior_logprobs - 0.3 for t in g.group.trajectories])
        for g in random_groups(tokenizer, 3, 3)
    ]
    raised = connected(tiny_config(folder, "algorithm.kl.coef=0.1", *words))
    higher = connected(tiny_config(folder, "algorithm.kl.coef=0.4", *words))
    factor, ranks = KLScale(), LearnerGroup(lambda: [LocalHandle(raised)], higher._config.timeouts, by_value)
    ranks.scale_kl_with(factor)
    factor.set_from(1, 4.0)
    report = await ranks.update(groups)
    expected = higher.update(groups, 1)
    assert report.metrics["kl_coef"] == expected.metrics["kl_coef"] == pytest.approx(0.4)
    assert largest_difference(copied(raised), copied(higher)) == 0
    factor.set_from(2, 1.0)
    assert (await ranks.update(groups)).metrics["kl_coef"] == pytest.approx(0.1)


async def test_a_rollback_is_the_saved_learner_under_the_number_of_its_step(folder, tokenizer, tmp_path) -> None:
    learner, groups = connected(tiny_config(folder, "algorithm.max_staleness=9")), random_groups(tokenizer, 3, 3)
    ranks = LearnerGroup(lambda: [LocalHandle(learner)], learner._config.timeouts, by_value)
    await ranks.update(groups)
    await ranks.save(tmp_path)
    assert await ranks.finish_save()
    saved = copied(learner)
    await ranks.update(groups)
    await ranks.update(groups)
    assert largest_difference(copied(learner), saved) > 0
    await ranks.restore(tmp_path, 3)
    assert (ranks.version, learner.version, learner.export_weights(1 << 20)[0]) == (3, 3, 3)
    assert largest_difference(copied(learner), saved) == 0
    assert (await ranks.update(groups)).version == 4


def test_the_change_of_policy_and_weights_follows_the_learning_rate(folder, tokenizer) -> None:
    found = {}
    for rate in (1e-12, 1e-4, 1e-3):
        config = tiny_config(folder, f"learner.learning_rate={rate}", "learner.warmup_steps=0", "num_steps=4")
        groups = sampled(config, folder, random_groups(tokenizer, 4, 4))
        found[rate] = connected(config).update(groups, 1).metrics
    assert found[1e-12]["policy_change"] < 1e-6, "scoring twice gives the same numbers"
    assert 0 < found[1e-4]["policy_change"] < found[1e-3]["policy_change"]
    assert found[1e-3]["weight_change"] == pytest.approx(10 * found[1e-4]["weight_change"], rel=0.05)
    assert found[1e-4]["logprob_gap_first"] < 1e-5 and found[1e-4]["logprob_gap_last"] < 1e-5


def test_the_gap_of_template_tokens_is_measured_separately(folder, tokenizer) -> None:
    """Behaviour log-probs of some ids are off by 0.5."""
    config = tiny_config(folder)
    groups = sampled(config, folder, random_groups(tokenizer, 4, 4))
    ids = tuple(set(groups[0].group.trajectories[0].actions.token_ids.tolist()))
    siblings = [scored.group.trajectories for scored in groups]
    is_template = [[np.isin(t.actions.token_ids, ids) for t in each] for each in siblings]
    off = [
        with_logprobs(scored, [t.behavior_logprobs + 0.5 * mask for t, mask in zip(each, masks, strict=True)])
        for scored, each, masks in zip(groups, siblings, is_template, strict=True)
    ]
    share = np.concatenate([mask for masks in is_template for mask in masks]).mean()
    assert 0 < share < 1
    metrics = connected(config, template_ids=ids).update(off, 1).metrics
    assert metrics["logprob_gap_template"] == pytest.approx(0.5, abs=1e-4)
    assert metrics["logprob_gap_mean"] == pytest.approx(0.5 * share, abs=1e-4)


def test_a_group_with_another_content_than_its_actor_reported_is_refused_by_name(folder, tokenizer) -> None:
    first, second = random_groups(tokenizer, 2, 2)
    reported = [dataclasses.replace(scored, summary=scored.group.summary()) for scored in (first, second)]
    learner = connected(tiny_config(folder))
    assert learner.update(reported, 1).version == 1
    altered = with_logprobs(reported[1], [t.behavior_logprobs + 1e-6 for t in second.group.trajectories])
    with pytest.raises(WrongGroupError, match=f"group {second.summary.group_id} has sha256"):
        learner.update([reported[0], altered], 2)
    assert learner.version == 1
