"""The learner on one process: exact under any split, exact after a resume, and safe where there is nothing to learn."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import LocalHandle
from learner_data import (
    add_dropout,
    changed,
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
    at_hand,
    connected_learner,
    copied,
    gradient_of,
    largest,
    largest_difference,
    scorer_of,
)

from mobula.cluster.errors import LostObjectError, WrongGroupError
from mobula.cluster.guard.guard import KLScale
from mobula.cluster.records.actions import KeptSets, TokenActions
from mobula.cluster.records.trajectory import ScoredGroup, WeightSpan
from mobula.configs.schema import LearnerConfig, RunConfig
from mobula.learner.backends import sharded
from mobula.learner.batch import fetch_items
from mobula.learner.examples import Example
from mobula.learner.learner import Learner
from mobula.learner.learner_group import LearnerGroup
from mobula.learner.optim import learning_rate
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

BANNED = (250, 251)
connected = partial(connected_learner, banned_ids=BANNED)


def sampled(config: RunConfig, folder: Path, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    """The groups as if the untrained policy had sampled them; it is their reference too."""
    return as_sampled(scorer_of(config, folder, BANNED), groups)


def of_spans(scored: ScoredGroup, *spans: Sequence[WeightSpan]) -> ScoredGroup:
    """The group with these versions for the tokens of each sibling."""
    made = edited(scored, weight_spans=[tuple(own) for own in spans])
    return dataclasses.replace(made, summary=dataclasses.replace(made.group.summary(), sha256=""))


def of_version_before(groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    return [of_spans(g, *([WeightSpan(-1, 0, t.num_steps)] for t in g.group.trajectories)) for g in groups]


def cut(scored: ScoredGroup, num_ids: int) -> ScoredGroup:
    """The group as if each token had been sampled among itself and about a tenth of the vocabulary."""
    rng, actions = np.random.default_rng(3), []
    for own in (t.actions for t in scored.group.trajectories):
        is_kept = rng.random((own.num_steps, num_ids)) < 0.1
        is_kept[np.arange(own.num_steps), own.token_ids] = True
        actions.append(dataclasses.replace(own, kept=KeptSets.of(is_kept)))
    return edited(scored, actions=actions)


def group_of_two(tokenizer, folder: Path) -> ScoredGroup:
    """Responses of four and two tokens after an image."""
    asked = prompt(tokenizer, "a", [image(1)])
    [made] = sampled(tiny_config(folder), folder, [group(asked, [[5, 6, 7, 8], [9, 1]], [1.0, 0.0])])
    return made


def policy_gradient(folder: Path, groups: list[ScoredGroup], version: int, *words: str) -> tuple[Tensors, dict]:
    """Gradient and metrics of the update that makes `version`."""
    return gradient_of(connected(tiny_config(folder, UNCLIPPED, *words)), groups, version)


def examples(tokenizer, num: int) -> list[Example]:
    """Questions with and without an image in turn; each answer is a digit."""
    made = []
    for n in range(num):
        answer = np.array([*tokenizer.encode(str(n % 10)), tokenizer.eos_token_id], dtype=np.int32)
        asked = prompt(tokenizer, f"e{n}", [image(n)][: n % 2], f"What is {n}?")
        made.append(Example.of_answer(asked, TokenActions(answer), answer >= 0))
    return made


def assert_on_policy(metrics: Mapping[str, float]) -> None:
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["kl"] == pytest.approx(0, abs=1e-8)
    assert metrics["logprob_gap_max"] < 1e-5


def test_at_step_zero_the_ratio_is_one_and_gap_and_kl_are_zero(folder, tokenizer) -> None:
    config = tiny_config(folder, "algorithm.kl.coef=0.1", "resources.reference.num_workers=1")
    groups = sampled(config, folder, random_groups(tokenizer, 6, 4))
    metrics = connected(config).update(groups, 1).metrics
    assert_on_policy(metrics)
    assert metrics["clip_fraction"] == 0
    lengths = [t.num_steps for g in groups for t in g.group.trajectories]
    assert metrics["response_length"] == pytest.approx(np.mean(lengths))
    assert metrics["num_tokens"] == sum(lengths)


def test_the_updates_that_the_configuration_names_are_profiled(folder, tokenizer, tmp_path: Path) -> None:
    config = tiny_config(folder, "tracing.profile_steps=[2]", f"folder={tmp_path}")
    groups = sampled(config, folder, random_groups(tokenizer, 2, 2))
    learner = connected(config)
    for version in (1, 2):
        learner.update(groups, version)
    assert [path.name for path in (config.run_folder / "traces").iterdir()] == ["update-000002-rank-0.json"]


def test_sampling_replay_and_fire_keep_the_ratio_at_one_and_the_kl_at_zero(folder, tokenizer) -> None:
    """Reference scorer and learner take the softmax over the kept set, at the temperature of the token's place."""
    words = ("algorithm.kl.coef=0.1", "sampler.top_k=20")
    config = tiny_config(folder, *words, "sampler.first_token_temperature=4.0")
    groups = sampled(config, folder, [cut(g, len(tokenizer)) for g in random_groups(tokenizer, 6, 4)])
    assert_on_policy(connected(config).update(groups, 1).metrics)
    other = connected(tiny_config(folder, *words)).update(groups, 1).metrics
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
    learner, groups = connected(config), sampled(config, folder, groups)
    metrics = learner.update(groups, 1).metrics
    assert metrics["num_tokens"] == 24 and metrics["response_length"] == 2
    learner.export(tmp_path / "after")
    after = scorer_of(config, tmp_path / "after", BANNED).score(groups)
    for scored, new, values in zip(groups, after, rewards, strict=True):
        rises = [float((b - a).sum()) > 0 for a, b in zip(scored.reference_logprobs, new, strict=True)]
        assert rises == [reward > 0 for reward in values]


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
    still = config.learner.model_copy(update={"learning_rate": 0.0})  # the schema refuses it
    learner = connected(config.model_copy(update={"learner": still}))
    before = copied(learner)
    learner.update(random_groups(tokenizer, 3, 4), 1)
    assert largest_difference(before, copied(learner)) == 0


@pytest.mark.parametrize("tokens", [30, 150, 100_000])
def test_siblings_that_compute_their_prompt_once_have_the_same_gradient(folder, tokenizer, tokens: int) -> None:
    groups = sampled(tiny_config(folder, "learner.packing=false"), folder, random_groups(tokenizer, 6, 4))
    words = ("learner.packing=true", f"learner.tokens_per_microbatch={tokens}")
    (shared, metrics), (single, expected) = (
        policy_gradient(folder, groups, 1, *words, f"learner.share_prompts={shares}") for shares in ("true", "false")
    )
    assert largest_difference(shared, single) < 1e-6
    share = metrics.pop("shared_prompt_share")
    assert metrics == pytest.approx(expected, abs=1e-6, rel=1e-4)
    prompts = sum(scored.summary.num_prompt_tokens for scored in groups)
    everything = 4 * prompts + sum(scored.summary.num_tokens for scored in groups)
    assert share >= (3 * prompts / everything if tokens == 100_000 else 0.1)


def test_the_gap_is_of_current_tokens_and_the_drift_of_older_ones(folder, tokenizer) -> None:
    whole = group_of_two(tokenizer, folder)
    aged = of_spans(whole, [WeightSpan(4, 0, 2), WeightSpan(5, 2, 4)], [WeightSpan(5, 0, 2)])
    moved = aged.group.trajectories[0].behavior_logprobs + np.float32([0.5, 0.25, 0, 0])
    aged = changed(aged, 0, behavior_logprobs=moved)
    _, metrics = policy_gradient(folder, [aged], 6, "algorithm.max_staleness=1")
    assert metrics["logprob_gap_max"] < 1e-5 and metrics["logprob_gap_mean"] < 1e-5
    assert metrics["logprob_drift_mean"] == pytest.approx(0.375, abs=1e-5)
    _, metrics = policy_gradient(folder, [aged], 7, "algorithm.max_staleness=2")
    assert "logprob_gap_mean" not in metrics and "logprob_gap_max" not in metrics, "no token is current"
    assert metrics["logprob_drift_mean"] == pytest.approx(0.75 / 6, abs=1e-5)


def test_a_masked_token_has_no_part_in_the_gradient_but_counts_in_the_mean(folder, tokenizer) -> None:
    whole = group_of_two(tokenizer, folder)
    aged = of_spans(whole, [WeightSpan(3, 0, 2), WeightSpan(5, 2, 4)], [WeightSpan(5, 0, 2)])
    found, metrics = policy_gradient(folder, [aged], 6, "algorithm.max_staleness=1")
    assert metrics["over_age_tokens"] == 2 and metrics["num_tokens"] == 6
    expected, _ = policy_gradient(folder, [changed(whole, 0, action_mask=np.array([False, False, True, True]))], 1)
    assert largest_difference(found, {name: g * 4 / 6 for name, g in expected.items()}) < 1e-6
    assert largest(found) > 1e-4


def test_a_reweighted_token_keeps_a_gradient_where_the_clip_takes_it_away(folder, tokenizer) -> None:
    asked = prompt(tokenizer, "a")
    [on_policy] = sampled(tiny_config(folder), folder, [group(asked, [[5, 6], [9, 1]], [1.0, 0.0])])
    drifted = [t.behavior_logprobs - shift for t, shift in zip(on_policy.group.trajectories, (1.0, -1.0), strict=True)]
    old = of_spans(with_logprobs(on_policy, drifted), [WeightSpan(0, 0, 2)], [WeightSpan(0, 0, 2)])
    reweighted = ("algorithm.max_staleness=1", "algorithm.over_age.action=reweight")
    clipped, _ = policy_gradient(folder, [old], 3, "algorithm.max_staleness=2")
    assert largest(clipped) == 0, "both ratios are beyond the clip"
    found, metrics = policy_gradient(folder, [old], 3, *reweighted)
    assert metrics["over_age_tokens"] == 4 and largest(found) > 1e-4
    masked, _ = policy_gradient(folder, [old], 4, *reweighted, "algorithm.over_age.reweighted_versions=1")
    assert largest(masked) == 0


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
    learner, answers = connected(tiny_config(folder)), []
    rows = examples(tokenizer, 2)
    for row in rows:
        [answer] = row.candidates
        asked = prompt(tokenizer, "whole", answer.sequence.media)
        whole = dataclasses.replace(asked, expanded_ids=answer.sequence.token_ids)
        answers += learner.sequence_logprobs(whole)[row.num_prompt_tokens - 1 :].tolist()
    assert learner.supervised_step(at_hand(rows))["loss"] == pytest.approx(-np.mean(answers), abs=1e-5)


def test_learning_rate_rises_and_falls_as_configured() -> None:
    def rates(schedule: str, warmup_steps: int, steps: Sequence[int], num_steps: int) -> list[float]:
        config = LearnerConfig.model_construct(learning_rate=1.0, warmup_steps=warmup_steps, schedule=schedule)
        return [learning_rate(config, step, num_steps) for step in steps]

    assert rates("constant", 4, (0, 1, 3, 4, 9), 10) == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert rates("linear", 0, range(5), 4) == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert rates("cosine", 0, (2, 4), 4) == pytest.approx([0.5, 0.0])


@pytest.fixture(scope="module")
def fresh_groups(folder, tokenizer) -> list[ScoredGroup]:
    """Sampled with the weights before the step."""
    return sampled(tiny_config(folder), folder, random_groups(tokenizer, 6, 4))


@pytest.mark.parametrize("words", [(), ("algorithm.num_minibatches=2", "algorithm.num_epochs=2")])
def test_a_step_of_older_tokens_is_measured_on_fresh_ones_before_the_weights_move(folder, fresh_groups, words) -> None:
    """Fresh tokens of other weights, as an engine with a stale tensor samples, or one with a penalty, are found."""
    config, older = tiny_config(folder, "learner.learning_rate=0.01", *words), of_version_before(fresh_groups)
    plain = connected(config).update(older, 1).metrics
    assert "logprob_gap_mean" not in plain
    fresh = fresh_groups[0].group
    metrics = connected(config).update(older, 1, fresh=[fresh]).metrics
    assert metrics["logprob_gap_mean"] <= metrics["logprob_gap_max"] < 1e-5
    assert {name: metrics[name] for name in plain} == plain, "the step itself is the same"
    off = with_logprobs(fresh_groups[0], [t.behavior_logprobs + 0.25 for t in fresh.trajectories])
    metrics = connected(config).update(older, 1, fresh=[off.group]).metrics
    assert metrics["logprob_gap_mean"] == pytest.approx(0.25, abs=1e-5)


def test_fresh_samples_that_are_lost_leave_a_step_without_a_gap(folder, fresh_groups, monkeypatch) -> None:
    def lost(references: list[str], **options: object) -> None:
        raise LostObjectError(references[0])

    monkeypatch.setattr("mobula.learner.measures.fetch_or_miss", lost)
    report = connected(tiny_config(folder)).update(of_version_before(fresh_groups), 1, fresh=["lost"])
    assert report.version == 1 and "logprob_gap_mean" not in report.metrics


def one_rank(learner: Learner, config: RunConfig) -> LearnerGroup:
    return LearnerGroup(lambda: [LocalHandle(learner)], config.timeouts, lambda value: value)


@pytest.mark.parametrize("place", ["loss", "reward"])
async def test_a_raised_kl_factor_trains_as_the_higher_coefficient_from_its_version_on(
    folder, tokenizer, place: str
) -> None:
    words = ("resources.reference.num_workers=1", f"algorithm.kl.place={place}", "algorithm.max_staleness=3")
    groups = [with_reference(g, gap=0.3) for g in random_groups(tokenizer, 3, 3)]
    config = tiny_config(folder, "algorithm.kl.coef=0.1", *words)
    raised, higher = connected(config), connected(tiny_config(folder, "algorithm.kl.coef=0.4", *words))
    factor, ranks = KLScale(), one_rank(raised, config)
    ranks.scale_kl_with(factor)
    factor.set_from(1, 4.0)
    report = await ranks.update(groups)
    expected = higher.update(groups, 1)
    assert report.metrics["kl_coef"] == expected.metrics["kl_coef"] == pytest.approx(0.4)
    assert largest_difference(copied(raised), copied(higher)) == 0
    factor.set_from(2, 1.0)
    assert (await ranks.update(groups)).metrics["kl_coef"] == pytest.approx(0.1)


async def test_a_rollback_is_the_saved_learner_under_the_number_of_its_step(folder, tokenizer, tmp_path) -> None:
    config, groups = tiny_config(folder, "algorithm.max_staleness=9"), random_groups(tokenizer, 3, 3)
    learner = connected(config)
    ranks = one_rank(learner, config)
    await ranks.update(groups)
    await ranks.save(tmp_path)
    assert await ranks.finish_save()
    before = copied(learner)
    await ranks.update(groups)
    await ranks.update(groups)
    assert largest_difference(copied(learner), before) > 0
    await ranks.restore(tmp_path, 3)
    assert (ranks.version, learner.version, learner.export_weights(1 << 20)[0]) == (3, 3, 3)
    assert largest_difference(copied(learner), before) == 0
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
