"""A learner with a critic: values before a step, advantages from them, and a critic that is trained on the returns."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_data import add_dropout, group, image, prompt, random_groups, tiny_config, with_logprobs
from one_learner import connected_learner
from taught import at_hand

from mobula.cluster.errors import CheckpointError
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.trajectory import FinishReason, ScoredGroup
from mobula.configs.overrides import overridden
from mobula.learner.batch import LearnerItem, fetch_items
from mobula.learner.credit import Credit
from mobula.learner.critic import Critic, ValueRow, collate_rows
from mobula.learner.examples import Example
from mobula.learner.learner import Learner
from mobula.learner.optim import MuonWithAdamW
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

PPO = ("algorithm=ppo_gae", "algorithm.kl.coef=0", "algorithm.critic.learning_rate=1e-3", "algorithm.max_staleness=99")
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def groups(tokenizer) -> list[ScoredGroup]:
    """Six groups of four, with no, one and two images, sampled by another policy."""
    return random_groups(tokenizer, 6, 4)


def connected(folder: Path, *overrides: str) -> Learner:
    return connected_learner(tiny_config(folder, *overridden(PPO, overrides)), (250, 251))


def critic_of(learner: Learner) -> Critic:
    assert isinstance(learner._critic, Critic)
    return learner._critic


def copied(module: torch.nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def difference(a: Weights, b: Weights) -> float:
    return max((a[name] - b[name]).abs().max().item() for name in a)


def changed(scored: ScoredGroup, sibling: int, **fields) -> ScoredGroup:
    rows = list(scored.group.trajectories)
    rows[sibling] = dataclasses.replace(rows[sibling], **fields)
    return dataclasses.replace(scored, group=dataclasses.replace(scored.group, trajectories=tuple(rows)))


def items_of(learner: Learner, groups: list[ScoredGroup]) -> list[LearnerItem]:
    """With values and advantages, as an update has them."""
    valued = critic_of(learner).valued(fetch_items(groups, 0, 1.0))
    return [item for row in Credit(learner._config).assign(valued).groups for item in row]


def critic_gradient(folder: Path, groups: list[ScoredGroup], *overrides: str) -> tuple[Weights, dict[str, float]]:
    """What one update saw, unclipped."""
    learner = connected(folder, "learner.max_grad_norm=1000000", *overrides)
    critic_of(learner)._optimizer.zero_grad = lambda: None
    metrics = learner.update(groups, 1).metrics
    return {name: p.grad for name, p in critic_of(learner)._model.named_parameters()}, dict(metrics)


def test_a_critic_learns_what_the_returns_are(folder, tokenizer) -> None:
    """Each prompt has one reward, so a critic that sees the image can predict it; the policy stays as it is."""
    steady = [
        group(prompt(tokenizer, f"p{n}", [image(n)]), [[1, 2, 3], [4, 5]], [float(n % 2)] * 2, n) for n in range(8)
    ]
    learner = connected(folder, "algorithm.critic.warmup_steps=30", "learner.warmup_steps=0")
    found = [learner.update(steady, version).metrics for version in range(1, 26)]
    assert found[-1]["value_loss"] < 0.05 * found[0]["value_loss"]
    assert found[0]["explained_variance"] < 0.2 and found[-1]["explained_variance"] > 0.9
    assert found[-1]["value_mean"] == pytest.approx(0.5, abs=0.1)
    assert all(math.isfinite(value) for step in found for value in step.values())


def test_the_value_loss_of_an_update_is_that_of_its_values_and_returns(folder, groups) -> None:
    """At the first minibatch the values are the old ones: half the mean squared error, unclipped."""
    learner = connected(folder)
    items = items_of(learner, groups)
    errors = np.concatenate([(item.values[:-1] - item.returns)[item.loss_mask] for item in items]).astype(np.float64)
    metrics = learner.update(groups, 1).metrics
    assert metrics["value_loss"] == pytest.approx((errors**2).mean() / 2, rel=1e-4)
    assert metrics["value_clip_fraction"] == 0
    returns = np.concatenate([item.returns[item.loss_mask] for item in items])
    assert metrics["return_mean"] == pytest.approx(returns.mean(), abs=1e-6)
    assert metrics["explained_variance"] == pytest.approx(1 - errors.var() / returns.var(), abs=1e-5)


def test_later_minibatches_are_clipped_around_the_values_before_the_step(folder, groups) -> None:
    words = ("algorithm.num_epochs=3", "algorithm.num_minibatches=3", "learner.warmup_steps=0")
    metrics = connected(folder, *words, "algorithm.critic.value_clip=0.001").update(groups, 1).metrics
    assert metrics["value_clip_fraction"] > 0.3 and metrics["skipped"] == metrics["critic_skipped"] == 0
    open_bound = connected(folder, *words, "algorithm.critic.value_clip=0").update(groups, 1).metrics
    assert open_bound["value_clip_fraction"] == 0


def test_the_gradient_of_the_critic_does_not_depend_on_the_split(folder, groups) -> None:
    small, metrics = critic_gradient(folder, groups, "learner.tokens_per_microbatch=60")
    whole, same = critic_gradient(folder, groups, "learner.tokens_per_microbatch=100000")
    assert difference(small, whole) < 2e-6 and max(g.abs().max() for g in whole.values()) > 1e-3
    assert metrics["value_loss"] == pytest.approx(same["value_loss"], rel=1e-5)


def test_values_are_those_of_each_row_alone_and_stay_with_their_response(folder, groups) -> None:
    """LightRFT defect B16: what belonged to one response went to another one."""
    learner = connected(folder, "learner.tokens_per_microbatch=200")
    together = critic_of(learner).valued(fetch_items(groups, 0, 1.0))
    for scored, row in zip(groups, together, strict=True):
        for n, item in enumerate(row):
            alone = dataclasses.replace(item, values=None)
            [[own]] = critic_of(learner).valued([[alone]])
            assert item.values.shape == (scored.group.trajectories[n].num_steps + 1,)
            np.testing.assert_allclose(item.values, own.values, atol=1e-6)


def test_a_token_that_was_not_sampled_has_no_value_loss(folder, groups) -> None:
    """LightRFT defect B14: masked tokens had a part in means. Of the masked ones not even the return is read."""
    learner = connected(folder)
    longest = max(range(4), key=lambda n: groups[0].group.trajectories[n].num_steps)
    mask = np.arange(groups[0].group.trajectories[longest].num_steps) % 2 == 0
    masked = [changed(groups[0], longest, action_mask=mask), *groups[1:]]
    items = items_of(learner, masked)
    item = items[longest]
    assert item.loss_mask.tolist() == mask.tolist() and not item.advantages[~mask].any()
    spoilt = dataclasses.replace(item, returns=np.where(mask, item.returns, 1e6).astype(np.float32))
    losses = []
    for own in (item, spoilt):
        again = connected(folder)
        rows = [own if i.index == own.index else i for i in items]
        losses.append(critic_of(again).train([rows], 1))
    assert losses[0] == losses[1] and losses[0]["value_loss"] < 10


def test_without_a_reward_there_is_nothing_to_predict(folder, tokenizer) -> None:
    asked = prompt(tokenizer, "a", [image(1)])
    scored = group(asked, [[1, 2], [3]], [1.0, None])
    items = items_of(connected(folder), [scored])
    assert not items[1].loss_mask.any() and not items[1].advantages.any()
    nothing = connected(folder)
    before = copied(critic_of(nothing)._model)
    metrics = nothing.update([group(asked, [[1, 2], [3]], [None, None])], 1).metrics
    assert metrics["explained_variance"] == 0 and "value_loss" not in metrics
    assert difference(before, copied(critic_of(nothing)._model)) == 0


def test_a_return_that_is_not_finite_moves_nothing_and_is_counted(folder, tokenizer) -> None:
    learner = connected(folder)
    models = (critic_of(learner)._model, learner._policy)
    before = [copied(model) for model in models]
    metrics = learner.update([group(prompt(tokenizer, "a"), [[1], [2]], [math.inf, 0.0])], 1).metrics
    assert (metrics["critic_skipped"], metrics["skipped"]) == (1, 1)
    assert [difference(b, copied(model)) for b, model in zip(before, models, strict=True)] == [0, 0]


@pytest.mark.parametrize("bootstraps", [True, False])
def test_advantages_of_an_update_are_those_of_gae_over_the_critics_values(folder, tokenizer, bootstraps) -> None:
    """Reference in plain Python: two turns, a response that was cut off, and a KL that tokens pay for."""
    scored = group(prompt(tokenizer, "a"), [[1, 2, 3, 4], [5, 6]], [1.0, 0.5])
    scored = changed(scored, 0, action_mask=np.array([True, False, True, True]))
    scored = changed(scored, 1, finish_reason=FinishReason.LENGTH)
    gaps = [np.array([0.1, 9.0, -0.2, 0.3], np.float32), np.array([0.4, 0.5], np.float32)]
    references = [t.behavior_logprobs - gap for t, gap in zip(scored.group.trajectories, gaps, strict=True)]
    scored = dataclasses.replace(scored, reference_logprobs=references)
    words = ("algorithm.kl.coef=0.5", "resources.reference.num_workers=1", "algorithm.gamma=0.9")
    words = (*words, f"algorithm.bootstrap_truncated={bootstraps}")
    learner = connected(folder, *words, "algorithm.gae_lambda=0.8", "algorithm.shaping.whiten=false")
    first, second = items_of(learner, [scored])
    cut = float(second.values[-1]) if bootstraps else 0.0
    cases = [(first, [0, 2, 3], 1.0, gaps[0], 0.0), (second, [0, 1], 0.5, gaps[1], cut)]
    for item, places, reward, gap, end in cases:
        values = [*(float(item.values[t]) for t in places), end]
        rewards = [-0.5 * float(gap[t]) for t in places]
        rewards[-1] += reward
        following = 0.0
        for k in reversed(range(len(places))):
            following = rewards[k] + 0.9 * values[k + 1] - values[k] + 0.9 * 0.8 * following
            assert item.advantages[places[k]] == pytest.approx(following, abs=1e-5)
            assert item.returns[places[k]] == pytest.approx(following + values[k], abs=1e-5)
    assert first.advantages[1] == 0


def test_gamma_and_lambda_reach_every_response(folder, tokenizer) -> None:
    """LightRFT defect B11: gamma was used on the first micro-batch only."""
    same = [group(prompt(tokenizer, f"g{n}"), [[1, 2, 3]], [1.0]) for n in range(5)]
    learner = connected(folder, "algorithm.gamma=0.5", "algorithm.gae_lambda=0.5", "algorithm.shaping.whiten=false")
    items = items_of(learner, same)
    for item in items:
        np.testing.assert_allclose(item.advantages, items[0].advantages, atol=1e-6)
    plain = items_of(connected(folder, "algorithm.shaping.whiten=false"), same)
    assert abs(items[4].advantages[0] - plain[4].advantages[0]) > 0.1


def test_advantages_are_whitened_once_after_the_returns_and_never_clamped(folder, groups) -> None:
    """LightRFT defect B14: advantages of GAE were normalised up to three times and clamped to 10."""
    plain = items_of(connected(folder, "algorithm.shaping.whiten=false"), groups)
    white = items_of(connected(folder), groups)
    values = np.concatenate([item.advantages[item.loss_mask] for item in plain]).astype(np.float64)
    expected = (values - values.mean()) / (values.std(ddof=1) + 1e-4)
    found = np.concatenate([item.advantages[item.loss_mask] for item in white])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    for a, b in zip(plain, white, strict=True):
        np.testing.assert_array_equal(a.returns, b.returns)
    rich = [dataclasses.replace(g, rewards=tuple(dataclasses.replace(r, value=1e6) for r in g.rewards)) for g in groups]
    huge = items_of(connected(folder, "algorithm.shaping.whiten=false"), rich)
    assert min(item.advantages[item.loss_mask].max() for item in huge) > 9e5


def test_the_critic_has_no_part_in_the_step_of_the_policy(folder, groups) -> None:
    """LightRFT defect B9: the critic's parameters took the place of the policy's, which were never clipped."""
    norms: dict[str, list[float]] = {"policy": [], "critic": []}
    words = ("learner.max_grad_norm=0.01", "learner.warmup_steps=0")
    slow = connected(folder, *words, "algorithm.critic.learning_rate=1e-9")
    fast = connected(folder, *words, "algorithm.critic.learning_rate=1e-2")
    owners = {"policy": (fast._policy, fast._optimizer), "critic": (critic_of(fast)._model, critic_of(fast)._optimizer)}
    for name, (model, optimizer) in owners.items():
        take = optimizer.step

        def step(name=name, model=model, take=take) -> None:
            norms[name].append(math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters())))
            take()

        optimizer.step = step
    metrics = fast.update(groups, 1).metrics
    assert metrics["grad_norm"] > 0.02 and metrics["critic_grad_norm"] > 0.02
    assert norms["policy"] == pytest.approx([0.01], rel=1e-3) and norms["critic"] == pytest.approx([0.01], rel=1e-3)
    before = copied(connected(folder)._policy)
    slow.update(groups, 1)
    assert difference(copied(slow._policy), copied(fast._policy)) == 0 < difference(before, copied(fast._policy))
    assert difference(copied(critic_of(slow)._model), copied(critic_of(fast)._model)) > 1e-3


def test_the_policy_waits_for_the_critics_warm_up(folder, groups) -> None:
    learner = connected(folder, "algorithm.critic.warmup_steps=2", "learner.warmup_steps=0")
    policy, critic = [copied(learner._policy)], [copied(critic_of(learner)._model)]
    found = []
    for version in range(1, 4):
        found.append(learner.update(groups, version).metrics)
        policy.append(copied(learner._policy))
        critic.append(copied(critic_of(learner)._model))
    assert [difference(a, b) > 0 for a, b in zip(policy, policy[1:], strict=False)] == [False, False, True]
    assert all(difference(a, b) > 0 for a, b in zip(critic, critic[1:], strict=False))
    assert [m["learning_rate"] > 0 for m in found] == [False, False, True]
    assert [m["skipped"] for m in found] == [0, 0, 0], "nothing was planned, so nothing was left out"
    assert all(m["critic_learning_rate"] > 0 and m["value_loss"] > 0 for m in found)


def test_the_course_of_the_learning_rate_is_that_of_the_learner(folder, groups) -> None:
    words = ("learner.warmup_steps=4", "learner.learning_rate=1e-5", "algorithm.critic.learning_rate=1e-3")
    learner = connected(folder, *words)
    rates = [learner.update(groups, version).metrics for version in (1, 2)]
    assert [m["critic_learning_rate"] for m in rates] == pytest.approx([2.5e-4, 5e-4])
    assert [m["learning_rate"] for m in rates] == pytest.approx([2.5e-6, 5e-6])


def test_values_have_no_dropout(tmp_path, tokenizer, groups) -> None:
    """LightRFT defect B21: scoring passes ran in training mode, and pads were pooled."""
    folder = add_dropout(write_tiny_qwen2_5_vl(tmp_path / "dropout", seed=0))
    kept = ("policy.dropout=true", "supervision.on_logprob_gap=warn")
    padded = ("policy.attention=eager", "learner.packing=false", "learner.tokens_per_microbatch=100000")
    learner = connected(folder, *kept, *padded)
    twice = [critic_of(learner).valued(fetch_items(groups, 0, 1.0)) for _ in range(2)]
    for a, b in zip(*([i for row in v for i in row] for v in twice), strict=True):
        np.testing.assert_array_equal(a.values, b.values)
        [[alone]] = critic_of(learner).valued([[dataclasses.replace(a, values=None)]])
        np.testing.assert_allclose(a.values, alone.values, atol=1e-6)
    row = ValueRow.of(dataclasses.replace(twice[0][0][0], returns=np.zeros(twice[0][0][0].sequence.num_targets)))
    batch = collate_rows([row], learner._reader, torch.device("cpu"))
    drawn = [critic_of(learner)._model(batch.tokens) for _ in range(2)]
    assert not torch.equal(*drawn), "training goes on with dropout"


LORA = ("policy.lora.rank=4", "policy.lora.alpha=64.0", "policy.lora.target_modules=[qkv,proj]")


@pytest.mark.parametrize("words", [(), LORA], ids=["full", "adapters"])
def test_the_critic_starts_from_the_policy_that_rl_begins_with(folder, tokenizer, groups, words) -> None:
    learner = connected(folder, *words, "warm_start.learning_rate=0.01")
    loaded = copied(critic_of(learner)._model)
    answer = np.array([1, 2, 3], np.int32)
    rows = [Example.of_answer(prompt(tokenizer, "t", [image(1)]), TokenActions(answer), answer > 0)]
    learner.supervised_step(at_hand(rows))
    assert difference(loaded, copied(critic_of(learner)._model)) == 0
    learner.begin_rl()
    policy = dict(learner._outgoing.plain_state(learner._backend))
    own = critic_of(learner)._model.model.state_dict()
    compared = 0
    for name, tensor in policy.items():
        module, _, leaf = name.rpartition(".")
        twin = name if name in own else f"{module}.base_layer.{leaf}"  # PEFT's name beside an adapter
        if twin in own:
            torch.testing.assert_close(own[twin], tensor, atol=1e-6, rtol=0)
            compared += 1
    assert compared == len(policy) - 1, "all but the output layer"
    trained = [name for name, p in critic_of(learner)._model.named_parameters() if p.requires_grad]
    assert "head.weight" in trained
    assert all("lora" in name or name == "head.weight" for name in trained) == bool(words)
    first, second = (learner.update(groups, version).metrics for version in (1, 2))
    assert second["value_loss"] != first["value_loss"]


def test_what_the_policy_freezes_is_frozen_in_the_critic_too(folder, groups) -> None:
    learner = connected(folder, "policy.freeze=[visual.]")
    before = copied(critic_of(learner)._model)
    learner.update(groups, 1)
    moved = {name for name, p in copied(critic_of(learner)._model).items() if not torch.equal(p, before[name])}
    assert moved and not any("visual" in name for name in moved)


def test_the_critic_has_an_optimizer_of_its_own(folder) -> None:
    learner = connected(folder, "algorithm.critic.optimizer=muon")
    critic = critic_of(learner)
    assert isinstance(critic._optimizer, MuonWithAdamW) and isinstance(learner._optimizer, torch.optim.AdamW)
    matrices, others = critic._optimizer.param_groups
    assert any(p is critic._model.head.weight for p in others["params"]), "one row is no hidden matrix"
    assert not any(p is critic._model.head.weight for p in matrices["params"])


def test_a_critic_goes_on_from_a_checkpoint_bit_for_bit(folder, groups, tmp_path) -> None:
    """LightRFT defect B10: optimizers were not saved."""
    learner = connected(folder)
    learner.update(groups, 1)
    learner.save(tmp_path / "state")
    learner.finish_save()
    again = connected(folder)
    assert again.load(tmp_path / "state") == 1
    ends = []
    for one in (learner, again):
        metrics = dict(one.update(groups[:3], 2).metrics)
        ends.append((metrics, copied(one._policy), copied(critic_of(one)._model)))
    assert ends[0][0] == ends[1][0]
    assert difference(ends[0][1], ends[1][1]) == 0 == difference(ends[0][2], ends[1][2])


def test_a_checkpoint_without_a_critic_is_refused(folder, groups, tmp_path) -> None:
    plain = connected_learner(tiny_config(folder))
    plain.save(tmp_path / "state")
    plain.finish_save()
    with pytest.raises(CheckpointError, match="holds no critic: a run without one wrote it"):
        connected(folder).load(tmp_path / "state")


def test_kl_in_the_loss_goes_with_a_critic(folder, groups) -> None:
    """LightRFT defect B25: GAE with a KL term in the loss ended in a NameError."""
    scored = [
        dataclasses.replace(
            with_logprobs(g, [t.behavior_logprobs for t in g.group.trajectories]),
            reference_logprobs=[t.behavior_logprobs - 0.1 for t in g.group.trajectories],
        )
        for g in groups
    ]
    words = ("algorithm.kl.coef=0.1", "algorithm.kl.place=loss", "algorithm.kl.estimator=k3")
    metrics = connected(folder, *words, "resources.reference.num_workers=1").update(scored, 1).metrics
    assert metrics["kl"] > 0 and metrics["skipped"] == 0 and math.isfinite(metrics["value_loss"])


def test_text_and_images_both_train_the_critic(folder, tokenizer) -> None:
    for shown in ([], [image(3)]):
        own = [group(prompt(tokenizer, f"p{n}", shown), [[1, 2], [3]], [1.0, 0.0], n) for n in range(2)]
        gradient, _ = critic_gradient(folder, own)
        vision = max(g.abs().max().item() for name, g in gradient.items() if "visual" in name)
        assert (vision > 0) == bool(shown) and gradient["head.weight"].any()
