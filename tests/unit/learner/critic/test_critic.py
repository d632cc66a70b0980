"""A learner with a critic: values before a step, advantages from them, and a critic that is trained on the returns."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_data import add_dropout, changed, cut_off, group, image, prompt, random_groups, tiny_config, with_reference
from one_learner import UNCLIPPED, Tensors, at_hand, connected_learner, copied, largest_difference, saved
from scored_rows import collated, plain_inputs, reader, tree
from tiny_checkpoints import write_text_policy
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from mobula.cluster.errors import CheckpointError
from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.configs.overrides import overridden
from mobula.configs.schema import RunConfig
from mobula.learner.backends.sharded import saved_sharded_weights, saved_tensors
from mobula.learner.batch import LearnerItem, fetch_items
from mobula.learner.critic import Critic, ScalarHead, ValueModel, ValueRow, collate_rows
from mobula.learner.examples import Example
from mobula.learner.learner import Learner
from mobula.learner.policies.batch import TokenSequence
from mobula.learner.policies.checkpoint import load_policy_model
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

PPO = ("algorithm=ppo_gae", "algorithm.kl.coef=0", "algorithm.critic.learning_rate=1e-3", "algorithm.max_staleness=99")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def groups(tokenizer) -> list[ScoredGroup]:
    """Six groups of four, with no, one and two images, sampled by another policy."""
    return random_groups(tokenizer, 6, 4)


def config_of(folder: Path, *overrides: str) -> RunConfig:
    return tiny_config(folder, *overridden(PPO, overrides))


def connected(folder: Path, *overrides: str) -> Learner:
    return connected_learner(config_of(folder, *overrides), (250, 251))


def critic_of(folder: Path, *overrides: str) -> Critic:
    """A critic without a learner."""
    critic = Critic(config_of(folder, *overrides), 0, 1, reader(), CPU)
    critic.connect()
    return critic


def values_of(learner: Learner, groups: list[ScoredGroup]) -> np.ndarray:
    """float32, of all tokens one after the other."""
    valued = learner.steps.critic.valued(fetch_items(groups, 0, 1.0))
    return np.concatenate([item.values for row in valued for item in row])


def weights_of(learner: Learner, folder: Path) -> Tensors:
    """The critic's own of a checkpoint, which has what is trained."""
    saved(learner, folder)
    return {name: read().clone() for name, read in saved_sharded_weights(folder / "critic").items()}


def items_of(learner: Learner, groups: list[ScoredGroup]) -> list[LearnerItem]:
    """With values and advantages, as an update has them."""
    valued = learner.steps.critic.valued(fetch_items(groups, 0, 1.0))
    return [item for row in learner.steps.credit.assign(valued).groups for item in row]


def trained(items: list[LearnerItem], name: str) -> np.ndarray:
    """float64, a column of the trained tokens of all items."""
    return np.concatenate([getattr(item, name)[item.loss_mask] for item in items]).astype(np.float64)


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
    returns = trained(items, "returns")
    assert metrics["return_mean"] == pytest.approx(returns.mean(), abs=1e-6)
    assert metrics["explained_variance"] == pytest.approx(1 - errors.var() / returns.var(), abs=1e-5)


def test_later_minibatches_are_clipped_around_the_values_before_the_step(folder, groups) -> None:
    words = ("algorithm.num_epochs=3", "algorithm.num_minibatches=3", "learner.warmup_steps=0")
    metrics = connected(folder, *words, "algorithm.critic.value_clip=0.001").update(groups, 1).metrics
    assert metrics["value_clip_fraction"] > 0.3 and metrics["skipped"] == metrics["critic_skipped"] == 0
    open_bound = connected(folder, *words, "algorithm.critic.value_clip=0").update(groups, 1).metrics
    assert open_bound["value_clip_fraction"] == 0


LARGE_EPS = ("learner.adam_eps=0.001", "learner.weight_decay=0", "learner.warmup_steps=0", UNCLIPPED)
"""A step is in proportion to a small gradient."""


def test_the_step_of_the_critic_does_not_depend_on_the_split(folder, groups, tmp_path) -> None:
    found = []
    for tokens in (60, 100_000):
        learner = connected(folder, *LARGE_EPS, f"learner.tokens_per_microbatch={tokens}")
        metrics = learner.update(groups, 1).metrics
        found.append((metrics["value_loss"], metrics["critic_grad_norm"], weights_of(learner, tmp_path / f"{tokens}")))
    (*small, weights), (*whole, same) = found
    assert largest_difference(weights, same) < 2e-6 and small == pytest.approx(whole, rel=1e-5)
    assert largest_difference(same, weights_of(connected(folder), tmp_path / "before")) > 1e-4


def test_values_are_those_of_each_row_alone_and_stay_with_their_response(folder, groups) -> None:
    """LightRFT defect B16: what belonged to one response went to another one."""
    critic = critic_of(folder, "learner.tokens_per_microbatch=200")
    for scored, row in zip(groups, critic.valued(fetch_items(groups, 0, 1.0)), strict=True):
        for trajectory, item in zip(scored.group.trajectories, row, strict=True):
            [[own]] = critic.valued([[dataclasses.replace(item, values=None)]])
            assert item.values.shape == (trajectory.num_steps + 1,)
            np.testing.assert_allclose(item.values, own.values, atol=1e-6)


def test_a_token_that_was_not_sampled_has_no_value_loss(folder, groups) -> None:
    """LightRFT defect B14: masked tokens had a part in means. Of the masked ones not even the return is read."""
    longest = max(range(4), key=lambda n: groups[0].group.trajectories[n].num_steps)
    mask = np.arange(groups[0].group.trajectories[longest].num_steps) % 2 == 0
    items = items_of(connected(folder), [changed(groups[0], longest, action_mask=mask), *groups[1:]])
    item = items[longest]
    assert item.loss_mask.tolist() == mask.tolist() and not item.advantages[~mask].any()
    spoilt = dataclasses.replace(item, returns=np.where(mask, item.returns, 1e6).astype(np.float32))
    expected, found = (
        critic_of(folder).train([[own if i.index == own.index else i for i in items]], 1) for own in (item, spoilt)
    )
    assert found == expected and found["value_loss"] < 10


def test_without_a_reward_there_is_nothing_to_predict(folder, tokenizer) -> None:
    learner, asked = connected(folder), prompt(tokenizer, "a", [image(1)])
    scored, nothing = (group(asked, [[1, 2], [3]], rewards) for rewards in ([1.0, None], [None, None]))
    item = items_of(learner, [scored])[1]
    assert not item.loss_mask.any() and not item.advantages.any()
    before = values_of(learner, [scored])
    metrics = learner.update([nothing], 1).metrics
    assert metrics["explained_variance"] == 0 and "value_loss" not in metrics
    np.testing.assert_array_equal(values_of(learner, [scored]), before)


def test_a_return_that_is_not_finite_moves_nothing_and_is_counted(folder, tokenizer) -> None:
    learner, infinite = connected(folder), [group(prompt(tokenizer, "a"), [[1], [2]], [math.inf, 0.0])]
    policy, values = copied(learner), values_of(learner, infinite)
    metrics = learner.update(infinite, 1).metrics
    assert (metrics["critic_skipped"], metrics["skipped"]) == (1, 1)
    assert largest_difference(policy, copied(learner)) == 0
    np.testing.assert_array_equal(values_of(learner, infinite), values)


@pytest.mark.parametrize("bootstraps", [True, False])
def test_advantages_of_an_update_are_those_of_gae_over_the_critics_values(folder, tokenizer, bootstraps) -> None:
    """Reference in plain Python: two turns, a response that was cut off, and a KL that tokens pay for."""
    scored = group(prompt(tokenizer, "a"), [[1, 2, 3, 4], [5, 6]], [1.0, 0.5])
    scored = cut_off(changed(scored, 0, action_mask=np.array([True, False, True, True])), 1)
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


def test_advantages_are_whitened_once_after_the_returns_and_never_clamped(folder, groups) -> None:
    """LightRFT defect B14: advantages of GAE were normalised up to three times and clamped to 10."""
    learner = connected(folder, "algorithm.shaping.whiten=false")
    plain, white = items_of(learner, groups), items_of(connected(folder), groups)
    values = trained(plain, "advantages")
    expected = (values - values.mean()) / (values.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(trained(white, "advantages"), expected, atol=1e-5)
    np.testing.assert_array_equal(trained(plain, "returns"), trained(white, "returns"))
    rich = [dataclasses.replace(g, rewards=tuple(dataclasses.replace(r, value=1e6) for r in g.rewards)) for g in groups]
    assert min(item.advantages[item.loss_mask].max() for item in items_of(learner, rich)) > 9e5


def test_each_gradient_is_clipped_to_a_norm_of_its_own(folder, groups, tmp_path) -> None:
    """LightRFT defect B9: the critic's parameters took the place of the policy's, which were never clipped. At a rate
    and an epsilon of 1 the first step of AdamW is the gradient."""
    words = ("learner.max_grad_norm=0.01", "learner.adam_eps=1", "learner.weight_decay=0", "learner.warmup_steps=0")
    learner = connected(folder, *words, "learner.learning_rate=1", "algorithm.critic.learning_rate=1")
    before = (copied(learner), weights_of(learner, tmp_path / "before"))
    metrics = learner.update(groups, 1).metrics
    assert metrics["grad_norm"] > 0.02 and metrics["critic_grad_norm"] > 0.02
    for old, new in zip(before, (copied(learner), weights_of(learner, tmp_path / "after")), strict=True):
        steps = [(new[name].double() - tensor.double()).square().sum().item() for name, tensor in old.items()]
        assert math.sqrt(sum(steps)) == pytest.approx(0.01, rel=1e-2)


def test_the_critic_has_no_part_in_the_step_of_the_policy(folder, groups) -> None:
    slow, fast = (connected(folder, f"algorithm.critic.learning_rate={rate}") for rate in ("1e-9", "1e-2"))
    before = copied(slow)
    for learner in (slow, fast):
        learner.update(groups, 1)
    assert largest_difference(copied(slow), copied(fast)) == 0 < largest_difference(before, copied(fast))
    assert np.abs(values_of(slow, groups) - values_of(fast, groups)).max() > 1e-3


def test_the_policy_waits_for_the_critics_warm_up(folder, groups) -> None:
    learner = connected(folder, "algorithm.critic.warmup_steps=2", "learner.warmup_steps=0")
    policy, values, found = [copied(learner)], [values_of(learner, groups)], []
    for version in range(1, 4):
        found.append(learner.update(groups, version).metrics)
        policy.append(copied(learner))
        values.append(values_of(learner, groups))
    assert [largest_difference(a, b) > 0 for a, b in zip(policy, policy[1:], strict=False)] == [False, False, True]
    assert all((a != b).any() for a, b in zip(values, values[1:], strict=False))
    assert [m["learning_rate"] > 0 for m in found] == [False, False, True]
    assert [m["skipped"] for m in found] == [0, 0, 0], "nothing was planned, so nothing was left out"
    assert all(m["critic_learning_rate"] > 0 and m["value_loss"] > 0 for m in found)


def test_the_course_of_the_learning_rate_is_that_of_the_learner(folder, groups) -> None:
    words = ("learner.warmup_steps=4", "learner.learning_rate=1e-5", "algorithm.critic.learning_rate=1e-3")
    learner = connected(folder, *words)
    rates = [learner.update(groups, version).metrics for version in (1, 2)]
    assert [m["critic_learning_rate"] for m in rates] == pytest.approx([2.5e-4, 5e-4])
    assert [m["learning_rate"] for m in rates] == pytest.approx([2.5e-6, 5e-6])


def test_values_have_no_dropout(tmp_path, groups) -> None:
    """LightRFT defect B21: scoring passes ran in training mode, and pads were pooled. Training goes on with dropout."""
    folder = add_dropout(write_tiny_qwen2_5_vl(tmp_path / "dropout", seed=0))
    kept = ("policy.dropout=true", "supervision.on_logprob_gap=warn")
    padded = ("policy.attention=eager", "learner.packing=false", "learner.tokens_per_microbatch=100000")
    first, second = (critic_of(folder, *kept, *padded) for _ in range(2))
    once, again = ([i for row in first.valued(fetch_items(groups, 0, 1.0)) for i in row] for _ in range(2))
    for a, b in zip(once, again, strict=True):
        np.testing.assert_array_equal(a.values, b.values)
        [[alone]] = first.valued([[dataclasses.replace(a, values=None)]])
        np.testing.assert_allclose(a.values, alone.values, atol=1e-6)
    items = [dataclasses.replace(item, returns=np.ones_like(item.behavior_logprobs)) for item in once]
    assert first.train([items], 1)["value_loss"] != second.train([items], 1)["value_loss"]


LORA = ("policy.lora.rank=4", "policy.lora.alpha=64.0", "policy.lora.target_modules=[qkv,proj]")


@pytest.mark.parametrize("words", [(), LORA], ids=["full", "adapters"])
def test_the_critic_starts_from_the_policy_that_rl_begins_with(folder, tokenizer, groups, words, tmp_path) -> None:
    learner = connected(folder, *words, "warm_start.learning_rate=0.01")
    loaded = values_of(learner, groups)
    answer = np.array([1, 2, 3], np.int32)
    rows = [Example.of_answer(prompt(tokenizer, "t", [image(1)]), TokenActions(answer), answer > 0)]
    learner.supervised_step(at_hand(rows))
    np.testing.assert_array_equal(values_of(learner, groups), loaded)
    learner.begin_rl()
    learner.export(tmp_path / "policy")
    expected = values_of(connected(tmp_path / "policy", *words), groups)
    np.testing.assert_allclose(values_of(learner, groups), expected, atol=1e-5)
    assert np.abs(expected - loaded).max() > 1e-3
    names = weights_of(learner, tmp_path / "state").keys()
    assert "head.weight" in names
    assert all("lora" in name or name == "head.weight" for name in names) == bool(words)
    first, second = (learner.update(groups, version).metrics for version in (1, 2))
    assert second["value_loss"] != first["value_loss"]


def test_what_the_policy_freezes_is_frozen_in_the_critic_too(folder, tmp_path) -> None:
    everything, some = (
        weights_of(connected(folder, *words), tmp_path).keys() for words in ((), ("policy.freeze=[visual.]",))
    )
    assert everything - some == {name for name in everything if "visual" in name} != set()


def test_the_critic_has_an_optimizer_of_its_own(folder, groups, tmp_path) -> None:
    learner = connected(folder, "algorithm.critic.optimizer=muon")
    learner.update(groups, 1)
    state = saved(learner, tmp_path)
    own, policys = set(saved_tensors(state / "critic")), set(saved_tensors(state))
    assert any(name.endswith(".momentum_buffer") for name in own)
    assert not any(name.endswith(".momentum_buffer") for name in policys)
    assert "optimizer.state.head.weight.exp_avg" in own, "one row is no hidden matrix"


def test_a_critic_goes_on_from_a_checkpoint_bit_for_bit(folder, groups, tmp_path) -> None:
    """LightRFT defect B10: optimizers were not saved."""
    learner, again = connected(folder), connected(folder)
    learner.update(groups, 1)
    assert again.load(saved(learner, tmp_path)) == 1
    assert learner.update(groups[:3], 2) == again.update(groups[:3], 2)
    assert largest_difference(copied(learner), copied(again)) == 0
    np.testing.assert_array_equal(values_of(learner, groups), values_of(again, groups))


def test_a_checkpoint_without_a_critic_is_refused(folder, tmp_path) -> None:
    state = saved(connected_learner(tiny_config(folder)), tmp_path)
    with pytest.raises(CheckpointError, match="holds no critic: a run without one wrote it"):
        connected(folder).load(state)


def test_kl_in_the_loss_goes_with_a_critic(folder, groups) -> None:
    """LightRFT defect B25: GAE with a KL term in the loss ended in a NameError."""
    words = ("algorithm.kl.coef=0.1", "algorithm.kl.place=loss", "algorithm.kl.estimator=k3")
    learner = connected(folder, *words, "resources.reference.num_workers=1")
    metrics = learner.update([with_reference(scored, gap=0.1) for scored in groups], 1).metrics
    assert metrics["kl"] > 0 and metrics["skipped"] == 0 and math.isfinite(metrics["value_loss"])


def test_text_and_images_both_train_the_critic(folder, tokenizer, tmp_path) -> None:
    for shown in ([], [image(3)]):
        own = [group(prompt(tokenizer, f"p{n}", shown), [[1, 2], [3]], [1.0, 0.0], n) for n in range(2)]
        learner = connected(folder, *LARGE_EPS)
        before = weights_of(learner, tmp_path / "before")
        learner.update(own, 1)
        after = weights_of(learner, tmp_path / "after")
        moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
        assert "head.weight" in moved and any("visual" in name for name in moved) == bool(shown)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def checkpoint(request, tmp_path_factory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny"), seed=0, tie_word_embeddings=request.param)


def value_model(checkpoint: Path, *overrides: str) -> ValueModel:
    config = tiny_config(checkpoint, *overrides)
    return ValueModel(load_policy_model(config.policy, torch.float32), config.learner, seed=3).eval()


@pytest.fixture
def model(checkpoint: Path) -> ValueModel:
    return value_model(checkpoint)


@pytest.fixture
def rows(tokenizer) -> list[TokenSequence]:
    """Text, one image, and two images of different sizes, with answers of different lengths."""
    shown = {"text": [], "one": [image(1)], "two": [image(2, 2, 4), image(3, 6, 4)]}
    answers = [[1, 2, 3], [4], [10, 11, 12, 13, 14]]
    return [
        TokenSequence.of_response(prompt(tokenizer, name, images), np.array(answer))
        for (name, images), answer in zip(shown.items(), answers, strict=True)
    ]


def plain_states(model, row: TokenSequence) -> torch.Tensor:
    """[T, H]: what transformers' own forward, with its own positions, has before each target."""
    states = model(**plain_inputs(row), output_hidden_states=True).hidden_states[-1][0]
    return states[row.num_context - 1 : -1]


@torch.no_grad()
def test_values_are_those_of_the_plain_forward_for_text_and_images(model, checkpoint, rows) -> None:
    """LightRFT defect B6: the critic had plain positions in the place of M-RoPE's."""
    plain = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).eval()
    for row, own in zip(rows, model(collated(rows)), strict=True):
        expected = plain_states(plain, row).double() @ model.head.weight[0].double()
        torch.testing.assert_close(own[: row.num_targets].double(), expected, atol=1e-7, rtol=1e-5)
        assert not own[row.num_targets :].any()


@torch.no_grad()
def test_values_of_a_text_family_are_those_of_the_plain_forward(tmp_path: Path) -> None:
    checkpoint = write_text_policy(tmp_path, "qwen3")
    row, model = TokenSequence(np.array([3, 4, 5, 6]), 2, (), ()), value_model(checkpoint)
    expected = plain_states(AutoModelForCausalLM.from_pretrained(checkpoint).eval(), row) @ model.head.weight[0]
    torch.testing.assert_close(model(collated([row]))[0], expected, atol=1e-7, rtol=1e-5)


@torch.no_grad()
def test_rows_that_share_prefixes_have_the_values_of_single_rows(checkpoint, tokenizer) -> None:
    """With one value after the last token of each row."""
    packed, padded = (value_model(checkpoint, f"learner.packing={on}") for on in ("true", "false"))
    asked = [prompt(tokenizer, "p0", [image(1), image(2, 6, 4)]), prompt(tokenizer, "p1")]
    rows = [row.with_end() for row in tree(asked)]
    for row, own in zip(rows, packed(collated(rows)), strict=True):
        torch.testing.assert_close(own[: row.num_targets], padded(collated([row]))[0], atol=1e-6, rtol=1e-6)


def test_the_gradient_of_a_value_reaches_the_backbone_and_the_vision_tower(model, rows) -> None:
    model(collated(rows)).sum().backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert [name for name in missing if "bias" not in name] == []


def test_the_model_has_no_output_layer_of_its_own(model) -> None:
    """It would be a matrix of the vocabulary that nothing reads."""
    assert [name for name in model.state_dict() if "lm_head" in name] == []


def test_every_rank_draws_the_same_head_and_no_generator_moves() -> None:
    before = torch.get_rng_state()
    first, second, other = ScalarHead(64, 1), ScalarHead(64, 1), ScalarHead(64, 2)
    assert torch.equal(first.weight, second.weight) and not torch.equal(first.weight, other.weight)
    assert torch.equal(torch.get_rng_state(), before)
    assert ScalarHead(4096, 1).weight.std().item() * 4097 == pytest.approx(1, abs=0.05)


def test_the_product_is_taken_in_float32() -> None:
    head, states = ScalarHead(64, 1), torch.randn(3, 5, 64, dtype=torch.bfloat16)
    expected = (states.double() * head.weight[0].double()).sum(-1)
    with torch.autocast("cpu", torch.bfloat16):
        found = head(states)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)


def test_a_row_has_the_tokens_of_its_item_and_one_more(tokenizer) -> None:
    for item in (item for items in fetch_items(random_groups(tokenizer, 3, 2), 0, 1.0) for item in items):
        row = ValueRow.of(item).sequence
        assert (row.num_targets, row.num_context) == (item.sequence.num_targets + 1, item.sequence.num_context)
        assert row.token_ids[:-1].tolist() == item.sequence.token_ids.tolist()
        assert row.media == item.sequence.media


def test_columns_are_as_wide_as_the_values_and_padding_has_no_loss(tokenizer) -> None:
    [items] = fetch_items([group(prompt(tokenizer, "a"), [[1, 2, 3], [4]], [1.0, 0.0])], 0, 1.0)
    values, returns = np.arange(1, 5, dtype=np.float32), np.full(3, 7, dtype=np.float32)
    sizes = [item.sequence.num_targets for item in items]
    valued = [
        dataclasses.replace(item, values=values[: n + 1], returns=returns[:n])
        for item, n in zip(items, sizes, strict=True)
    ]
    batch = collate_rows([ValueRow.of(item) for item in valued], reader(), CPU)
    assert batch.old_values.tolist() == [[1, 2, 3, 4], [1, 2, 0, 0]]
    assert batch.returns.tolist() == [[7, 7, 7, 0], [7, 0, 0, 0]]
    assert batch.mask.tolist() == [[True] * 3 + [False], [True] + [False] * 3]
    assert batch.tokens.targets.shape == (2, 4)


def test_without_values_or_tokens_rows_are_filled_up_with_nothing(tokenizer) -> None:
    [items] = fetch_items([group(prompt(tokenizer, "a"), [[], [5]], [1.0, 0.0])], 0, 1.0)
    rows = [ValueRow.of(item) for item in items]
    assert rows[0].sequence.num_targets == 1, "an empty response has the value of its prompt"
    batch = collate_rows(rows, reader(), CPU)
    assert batch.old_values.tolist() == batch.returns.tolist() == [[0.0, 0.0]] * 2
    assert batch.mask.tolist() == [[False, False], [True, False]]


def test_what_is_filtered_or_untrained_has_no_value_loss(tokenizer) -> None:
    [[item]] = fetch_items([group(prompt(tokenizer, "a"), [[1, 2]], [1.0])], 0, 1.0)
    assert not ValueRow.of(item.without_loss()).mask.any()
    assert not ValueRow.of(item).untrained().mask.any() and ValueRow.of(item).mask.all()
