"""Credit: rewards become token advantages, each change once, in one order, the same on every rank."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from learner_data import changed, cut_off, edited, group, prompt, random_groups, tiny_config

from mobula.cluster.records.trajectory import EpisodeTurn, Reward, ScoredGroup
from mobula.learner.batch import LearnerItem, fetch_items, minibatches_of, select_by_entropy, totals
from mobula.learner.credit import Credit


def credited(folder: Path, groups: list[ScoredGroup], *overrides: str) -> tuple[list[LearnerItem], dict[str, float]]:
    found = Credit(tiny_config(folder, *overrides)).assign(fetch_items(groups, 0, 1.0))
    return [item for row in found.groups for item in row], found.metrics


def advantages(folder: Path, groups: list[ScoredGroup], *overrides: str) -> list[float]:
    """Of each response, whose tokens all have the same."""
    items, _ = credited(folder, groups, *overrides)
    assert all(np.ptp(item.advantages) < 1e-6 for item in items)
    return [float(item.advantages[0]) for item in items]


def test_every_token_of_a_response_has_its_advantage_and_uniform_groups_are_counted(folder, tokenizer) -> None:
    """A response without a reward is neither trained nor compared."""
    groups = [
        group(prompt(tokenizer, "a"), [[1, 2, 3], [7], [4]], [1.0, None, 0.0]),
        group(prompt(tokenizer, "b"), [[1], [2]], [0.5, 0.5]),
        group(prompt(tokenizer, "c"), [[1], [2]], [0.5, None]),
    ]
    items, metrics = credited(folder, groups, "algorithm=dr_grpo")
    assert [i.advantages.tolist() for i in items] == [[0.5] * 3, [0.0], [-0.5], [0.0], [0.0], [0.0], [0.0]]
    assert [i.num_trained for i in items] == [3, 0, 1, 1, 1, 1, 0]
    assert metrics["uniform_groups"] == 2


def test_groups_of_different_sizes_keep_their_own_rewards(folder, tokenizer) -> None:
    """LightRFT defect B16: nine rewards over four micro-batches were split three ways, and the rest had none."""
    sizes = [1, 4, 2, 2]
    groups = [
        group(prompt(tokenizer, f"g{n}"), [[5]] * size, [float(10 * n + i) for i in range(size)])
        for n, size in enumerate(sizes)
    ]
    expected = [10.0 * n + i for n, size in enumerate(sizes) for i in range(size)]
    assert advantages(folder, groups, "algorithm.advantage=reinforce") == expected


def test_advantages_are_not_clamped_unless_asked_for(folder, tokenizer) -> None:
    """LightRFT defect B14: the trainer clamped advantages to 10 without a key for it."""
    groups = [group(prompt(tokenizer, "a"), [[1], [2]], [1e6, 0.0])]
    assert advantages(folder, groups, "algorithm=dr_grpo") == [5e5, -5e5]
    items, metrics = credited(folder, groups, "algorithm=dr_grpo", "algorithm.shaping.advantage_clip=10")
    assert [item.advantages.tolist() for item in items] == [[10.0], [-10.0]]
    assert metrics["advantage_clip_fraction"] == 1.0


def test_rewards_are_clipped_before_they_are_compared(folder, tokenizer) -> None:
    groups = [group(prompt(tokenizer, "a"), [[1], [2]], [7.0, 0.0])]
    items, metrics = credited(folder, groups, "algorithm=dr_grpo", "algorithm.shaping.reward_clip=2")
    assert [item.advantages.tolist() for item in items] == [[1.0], [-1.0]]
    assert metrics["reward_clip_fraction"] == 0.5 and metrics["shaped_reward_mean"] == 1.0


def test_penalties_come_before_the_clip_and_each_is_applied_once(folder, tokenizer) -> None:
    groups = [group(prompt(tokenizer, "a"), [[5, 5, 5, 5, 5], [1, 2, 3]], [1.0, 1.0])]
    words = ["algorithm.advantage=reinforce", "algorithm.shaping.repetition_ngram=2"]
    # four bigrams, of which three repeat the first; lengths 5 and 3, both solved: -0.5 and 0.5
    only_repetition = advantages(folder, groups, *words, "algorithm.shaping.repetition_penalty=2")
    assert only_repetition == pytest.approx([1 - 2 * 0.75, 1.0])
    words += ["algorithm.shaping.repetition_penalty=2", "algorithm.shaping.length_penalty=1"]
    assert advantages(folder, groups, *words) == pytest.approx([1 - 1.5 - 0.5, 1.5])
    assert advantages(folder, groups, *words, "algorithm.shaping.reward_clip=0.75") == pytest.approx([-0.75, 0.75])


def test_running_moments_come_before_the_group_is_compared_and_last_for_the_run(folder, tokenizer) -> None:
    """LightRFT defect B13: rewards were divided after the group was standardised, and evaluation moved the moments."""
    config = tiny_config(folder, "algorithm.advantage=reinforce", "algorithm.shaping.running_moments=standardise")
    credit = Credit(config)
    steps = [[1.0, 3.0], [5.0, 7.0]]
    found = []
    for rewards in steps:
        fetched = fetch_items([group(prompt(tokenizer, "a"), [[1], [2]], rewards)], 0, 1.0)
        found.append([float(item.advantages[0]) for item in credit.assign(fetched).groups[0]])
    assert found[0] == pytest.approx([(r - 2) / np.std([1, 3], ddof=1) for r in steps[0]])
    assert found[1] == pytest.approx([(r - 4) / np.std([1, 3, 5, 7], ddof=1) for r in steps[1]])


def test_whitening_is_over_trained_tokens_and_once(folder, tokenizer) -> None:
    """LightRFT defect B14: advantages were normalised up to three times, and masked tokens were in the mean."""
    scored = group(prompt(tokenizer, "a"), [[1, 2, 3], [4, 5]], [1.0, 0.0])
    masked = changed(scored, 0, action_mask=np.array([True, False, True]))
    items, _ = credited(folder, [masked], "algorithm.advantage=reinforce", "algorithm.shaping.whiten=true")
    trained = np.concatenate([item.advantages[item.loss_mask] for item in items])
    values = np.array([1.0, 1.0, 0.0, 0.0])
    assert trained.tolist() == pytest.approx(((values - 0.5) / (values.std(ddof=1) + 1e-4)).tolist(), abs=1e-6)
    assert items[0].advantages[1] == 0, "a masked token"


def test_kl_in_the_reward_reaches_every_response_and_every_token_before_it(folder, tokenizer) -> None:
    """LightRFT defect B7: only the first response got its reward and its KL (packs: `test_packed_attention.py`)."""
    scored = group(prompt(tokenizer, "a"), [[1, 2, 3], [4, 5]], [1.0, 0.0])
    gaps = [np.array([0.1, 0.2, 0.4], np.float32), np.array([0.5, -0.3], np.float32)]
    references = [t.behavior_logprobs - gap for t, gap in zip(scored.group.trajectories, gaps, strict=True)]
    scored = replace(scored, reference_logprobs=references)
    words = ["algorithm.advantage=reinforce", "algorithm.kl.coef=0.5", "resources.reference.num_workers=1"]
    words += ["algorithm.kl.estimator=k1", "algorithm.kl.place=reward"]
    items, _ = credited(folder, [scored], *words)
    for item, gap, reward in zip(items, gaps, [1.0, 0.0], strict=True):
        expected = [reward - 0.5 * sum(gap[t:]) for t in range(len(gap))]
        assert item.advantages.tolist() == pytest.approx(expected, abs=1e-5)
    capped, _ = credited(folder, [scored], *words, "algorithm.kl.token_cap=0.15")
    assert capped[1].advantages.tolist() == pytest.approx([-0.5 * (0.15 - 0.15), -0.5 * -0.15], abs=1e-5)


def test_gamma_discounts_every_response(folder, tokenizer) -> None:
    """LightRFT defect B11: only the first micro-batch was discounted."""
    groups = [group(prompt(tokenizer, f"g{n}"), [[1, 2, 3]], [1.0]) for n in range(5)]
    items, _ = credited(folder, groups, "algorithm.advantage=reinforce", "algorithm.gamma=0.5")
    assert [item.advantages.tolist() for item in items] == [[0.25, 0.5, 1.0]] * 5


def test_gdpo_reads_components_with_the_weights_of_the_label(folder, tokenizer) -> None:
    asked = replace(prompt(tokenizer, "a"), metadata={"label": "short"})
    scored = group(asked, [[1], [2], [3]], [0.0, 0.0, 0.0])
    rewards = tuple(Reward(0.0, {"accuracy": a, "format": f}) for a, f in ((1.0, 0.0), (0.0, 1.0), (0.0, 0.0)))
    scored = replace(scored, rewards=rewards)
    by_weight = advantages(folder, [scored], "algorithm=gdpo")
    assert by_weight[0] > 0 and by_weight[1] == pytest.approx(by_weight[2]), "the format weighs nothing"
    recipe = (
        "rewards.recipes={short: {components: [accuracy, format], weights: {format: 2.0}, gates: [], normalise: false}}"
    )
    by_recipe = advantages(folder, [scored], "algorithm=gdpo", recipe)
    assert by_recipe[1] > by_recipe[0] > by_recipe[2]


def test_the_state_of_a_resumed_run_is_the_old_one(folder, tokenizer) -> None:
    """LightRFT defect B10: moments and the KL coefficient were not saved."""
    words = ["algorithm.shaping.running_moments=scale", "algorithm.kl.controller=adaptive", "algorithm.kl.coef=0.1"]
    config = tiny_config(folder, *words, "resources.reference.num_workers=1")
    first, second = Credit(config), Credit(config)
    first.assign(fetch_items(random_groups(tokenizer, 2, 3), 0, 1.0))
    first.kl.observe(3.0, 64)
    second.load(first.state())
    assert second.state() == first.state() and second.kl.value != 0.1


def of_rows(groups: list[ScoredGroup], *sample_ids: str) -> list[list[LearnerItem]]:
    items = fetch_items(groups, 0, 1.0)
    return [[replace(item, sample_id=name) for item in row] for row, name in zip(items, sample_ids, strict=True)]


def test_a_prompt_is_compared_with_its_rewards_of_the_last_steps_and_a_resumed_run_knows_them(
    folder, tokenizer
) -> None:
    words = ["algorithm.advantage=prompt_stats", "algorithm.std=population", "algorithm.prompt_history_steps=2"]
    config = tiny_config(folder, *words)
    credit, resumed = Credit(config), Credit(config)
    rewards = [[0.0, 1.0], [0.5, 0.5], [1.0, 1.0], [0.25, 0.75]]  # of each step, all of one row but the second
    rows = ["a", "b", "a", "a"]
    for values, row in zip(rewards[:3], rows[:3], strict=True):
        last = credit.assign(of_rows([group(prompt(tokenizer, "p"), [[1, 2], [3]], values)], row))
    known = [0.0, 1.0, 1.0, 1.0]
    expected = (1 - np.mean(known)) / (np.std(known) + 1e-4)
    assert [float(i.advantages[0]) for i in last.groups[0]] == pytest.approx([expected] * 2, rel=1e-5)

    resumed.load(json.loads(json.dumps(credit.state())))
    fourth = of_rows([group(prompt(tokenizer, "p"), [[1, 2], [3]], rewards[3])], rows[3])
    found = [float(i.advantages[0]) for i in resumed.assign(fourth).groups[0]]
    known = [1.0, 1.0, 0.25, 0.75]  # the first step is three steps ago
    assert found == pytest.approx([(r - np.mean(known)) / (np.std(known) + 1e-4) for r in rewards[3]], rel=1e-5)
    assert [float(i.advantages[0]) for i in credit.assign(fourth).groups[0]] == found


def test_a_fixed_coefficient_is_the_configured_one_after_a_resume(folder) -> None:
    credit = Credit(tiny_config(folder, "algorithm.kl.coef=0.1", "resources.reference.num_workers=1"))
    credit.load({**credit.state(), "kl_coef": 7.0})
    assert credit.kl.value == 0.1


def test_a_sampled_eos_is_trained_and_a_response_that_was_cut_off_is_known_as_such(tokenizer) -> None:
    """LightRFT defect B15: the finish reason was lost, and the last token was overwritten by an EOS."""
    eos = tokenizer.eos_token_id
    scored = cut_off(group(prompt(tokenizer, "a"), [[7, eos], [7, 8]], [1.0, 0.0]), 1)
    [[whole, cut]] = fetch_items([scored], 0, 1.0)
    assert (whole.is_truncated, cut.is_truncated) == (False, True)
    for item, ids in ((whole, [7, eos]), (cut, [7, 8])):
        assert item.response_ids.tolist() == item.sequence.token_ids[-2:].tolist() == ids
        assert item.loss_mask.tolist() == [True, True]


def test_a_response_without_loss_counts_where_a_mean_is_taken(tokenizer) -> None:
    [[item, other]] = fetch_items([group(prompt(tokenizer, "a"), [[1, 2], [3]], [1.0, 0.0])], 0, 1.0)
    assert totals([item.without_loss(), other]) == totals([item, other])
    assert totals([item.untrained(), other]).num_tokens == 1


def test_minibatches_without_any_loss_are_left_out(folder, tokenizer) -> None:
    """LightRFT defect B3: a batch in which every token was masked was trained on a NaN."""
    groups = fetch_items(random_groups(tokenizer, 2, 2), 0, 1.0)
    silent = [[item.without_loss() for item in groups[0]], groups[1]]
    assert minibatches_of(silent, tiny_config(folder, "algorithm.num_minibatches=2").algorithm, (5, 1)) == [groups[1]]


def test_later_epochs_hold_the_same_groups_in_an_order_of_the_seed(folder, tokenizer) -> None:
    groups = fetch_items(random_groups(tokenizer, 12, 1), 0, 1.0)
    algorithm = tiny_config(folder, "algorithm.num_epochs=3", "algorithm.num_minibatches=1").algorithm

    def places_of(seed: tuple[int, int]) -> list[list[int]]:
        return [[row.group for row in epoch] for epoch in minibatches_of(groups, algorithm, seed)]

    first, second, third = places_of((5, 1))
    assert first == list(range(12)) and sorted(second) == sorted(third) == first
    assert second != first and third != second
    assert places_of((5, 1)) == [first, second, third]
    assert places_of((5, 2))[1] != second


def chosen(items: list[LearnerItem], values: list[list[float]], share: float) -> list[list[bool]]:
    """Which tokens of these entropies are selected."""
    pairs = zip(items, values, strict=True)
    scored = [replace(item, entropies=np.array(row, np.float32)) for item, row in pairs]
    selected = select_by_entropy(scored, share)
    assert all((a.loss_mask == b.loss_mask).all() for a, b in zip(selected, items, strict=True))
    return [item.policy_mask.tolist() for item in selected]


def test_the_highest_entropies_of_the_whole_minibatch_are_selected(tokenizer) -> None:
    """LightRFT selected within each response, and never: the ratio did not reach its trainer. A filtered response has
    no part in the selection."""
    [items] = fetch_items([group(prompt(tokenizer, "a"), [[1, 2, 3], [4, 5]], [1.0, 0.0])], 0, 1.0)
    entropies = [[0.9, 0.8, 0.1], [0.2, 0.3]]
    assert chosen(items, entropies, 0.4) == [[True, True, False], [False, False]]
    assert chosen(items, entropies, 0.01) == [[True, False, False], [False, False]]
    assert chosen([items[0].without_loss(), items[1]], entropies, 0.5) == [[False] * 3, [False, True]]


EPISODES = ("data=environment", "environment=calculator", "warm_start=none")
ACCURACY = "rewards.accuracy_component=paid"
RECIPE = (
    "rewards.components=[{name: paid, function: environment, weight: 2.0, options: {discount: 1.0}, service: reward, "
    "needs_images: false, retries: 0, cache_entries: 0}, {name: brief, function: exact_match, weight: 1.0, options: "
    "{}, service: reward, needs_images: false, retries: 0, cache_entries: 0}]"
)


def episodes(tokenizer) -> ScoredGroup:
    """Two turns, one turn and an episode that failed; the environment's part counts twice, the other once."""
    mask = np.array([True, True, False, False, True])
    turns = (EpisodeTurn(0, 2, "", "", {"a": 1.0, "b": 0.5}, "none"), EpisodeTurn(4, 5, "", "", {"a": 3.0}, "none"))
    found = group(prompt(tokenizer, "e"), [[1, 2, 9, 9, 3], [4, 5], [6]], [9.0 + 0.25, 2.0 + 0.5, None])
    of_each = [turns, (replace(turns[0], rewards={"a": 1.0}),), ()]
    responses = [replace(t.response, turns=own) for t, own in zip(found.group.trajectories, of_each, strict=True)]
    rewards = (Reward(9.25, {"paid": 4.5, "brief": 0.25}), Reward(2.5, {"paid": 1.0, "brief": 0.5}), None)
    return replace(edited(found, action_mask=[mask, mask[:2], mask[:1]], response=responses), rewards=rewards)


def test_return_to_go_credits_each_turn_with_what_followed_it(folder, tokenizer) -> None:
    words = (*EPISODES, RECIPE, ACCURACY, "algorithm.advantage=return_to_go")
    items, metrics = credited(folder, [episodes(tokenizer)], *words)
    # by turn: [2 * 1.5, 2 * 3 + 0.25] and [2 * 1 + 0.5]
    assert items[0].advantages.tolist() == pytest.approx([9.25 - 2.5] * 2 + [0.0] * 2 + [6.25])
    assert items[1].advantages.tolist() == pytest.approx([2.5 - 9.25] * 2)
    assert items[2].advantages.tolist() == [0.0]
    assert metrics["turns_mean"] == 1.5
    assert (metrics["turn_reward_1"], metrics["turn_reward_2"]) == (1.25, 1.5)
    discounted, _ = credited(folder, [episodes(tokenizer)], *words, "algorithm.turn_discount=0.5")
    assert discounted[0].advantages[0] == pytest.approx(3 + 0.5 * 6.25 - 2.5)


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        ("gae", [0.5 - 0.2, 3.0 + 0.7 - 0.5, 6.25 - 0.7]),
        ("turn_gae", [3.0 + 0.5 * 0.7 - 0.2, 3.0 + 0.5 * 0.7 - 0.2, 6.25 - 0.7]),
    ],
)
def test_a_critic_credits_tokens_with_the_reward_of_their_own_turn(folder, tokenizer, advantage, expected) -> None:
    """At lambda 0 a reward reaches no earlier decision but through a value; a decision is a token or a turn."""
    values = np.array([0.2, 0.5, 9.0, 9.0, 0.7, 9.0], np.float32)
    words = (*EPISODES, RECIPE, ACCURACY, f"algorithm.advantage={advantage}", "algorithm.critic.place=learner_ranks")
    lean = ("algorithm.gae_lambda=0", "algorithm.turn_discount=0.5")
    [items] = fetch_items([episodes(tokenizer)], 0, 1.0)
    valued = [[replace(item, values=values[: len(item.loss_mask) + 1]) for item in items]]
    found = Credit(tiny_config(folder, *words, *lean)).assign(valued).groups[0][0]
    assert found.advantages[found.loss_mask].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algorithm.advantage=return_to_go"], "set environment=OPTION rewards=environment"),
        ([*EPISODES, "rewards=environment", "algorithm.advantage=return_to_go", "algorithm.gamma=0.9"], "by turns"),
        (
            [*EPISODES, "rewards=environment", "algorithm.advantage=return_to_go", "algorithm.shaping.reward_clip=1"],
            "as the environment paid them",
        ),
    ],
)
def test_credit_of_turns_needs_the_rewards_of_turns(folder, words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(folder, *words)
