"""Advantages of responses, and the shaping of rewards."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import statistics
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from mobula.configs.schema.algorithm import STEP_WIDE
from mobula.learner.algorithms.advantages import (
    ADVANTAGES,
    STD_FLOOR,
    AdvantageOptions,
    EarlierRewards,
    RunningMoments,
    StepRewards,
    whitened,
)
from mobula.learner.algorithms.shaping import credit_by_token, length_rewards, repeated_share

OPTIONS = AdvantageOptions(std="unbiased", pass_k=2, solved_reward=1.0)

NOTHING_EARLIER = EarlierRewards(torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.int64))

GROUP_RELATIVE = sorted(ADVANTAGES.keys() - set(STEP_WIDE))


def step(groups: list[list[float]], lengths: list[list[int]] | None = None) -> StepRewards:
    """Rewards by group, in the order of the groups; one component, of weight 1, that is the reward itself."""
    values = [r for group in groups for r in group]
    ids = [n for n, group in enumerate(groups) for _ in group]
    sizes = [n for group in lengths for n in group] if lengths else [1] * len(values)
    return StepRewards(
        values=torch.tensor(values, dtype=torch.float64),
        included=torch.ones(len(values), dtype=torch.bool),
        group_ids=torch.tensor(ids),
        lengths=torch.tensor(sizes),
        components=torch.tensor(values, dtype=torch.float64)[:, None],
        weights=torch.ones(len(values), 1, dtype=torch.float64),
        prompt_ids=torch.tensor(ids),
        earlier=NOTHING_EARLIER,
    )


def spread(values: list[float], kind: str) -> float:
    """Standard deviation by the standard library; 0 for one value."""
    if kind == "population":
        return statistics.pstdev(values)
    return statistics.stdev(values) if len(values) > 1 else 0.0


Reference = Callable[[list[list[float]], list[list[int]], str], list[float]]


def by_group(formula: Callable[[list[float], list[int], str], list[float]]) -> Reference:
    return lambda groups, lengths, std: [
        a
        for g, n in zip(groups, lengths, strict=True)
        for a in (formula(g, n, std) if len(set(g)) > 1 else [0.0] * len(g))
    ]


def reference_grpo(rewards: list[float], lengths: list[int], std: str, floor: float = STD_FLOOR) -> list[float]:
    mean = statistics.fmean(rewards)
    return [(r - mean) / (spread(rewards, std) + floor) for r in rewards]


def reference_dr_grpo(rewards: list[float], lengths: list[int], std: str) -> list[float]:
    return [r - statistics.fmean(rewards) for r in rewards]


def reference_rloo(rewards: list[float], lengths: list[int], std: str) -> list[float]:
    others = [rewards[:i] + rewards[i + 1 :] for i in range(len(rewards))]
    return [r - statistics.fmean(rest) for r, rest in zip(rewards, others, strict=True)]


def reference_opo(rewards: list[float], lengths: list[int], std: str) -> list[float]:
    baseline = sum(n * r for n, r in zip(lengths, rewards, strict=True)) / sum(lengths)
    return [r - baseline for r in rewards]


def reference_pass_at_k(rewards: list[float], lengths: list[int], std: str) -> list[float]:
    """By enumeration: every subset of k siblings has the reward of its best; a sibling gets the mean advantage of the
    subsets that it is in."""
    subsets = list(itertools.combinations(range(len(rewards)), OPTIONS.pass_k))
    passes = [float(any(rewards[i] >= OPTIONS.solved_reward for i in subset)) for subset in subsets]
    if len(set(passes)) < 2:
        return [0.0] * len(rewards)
    mean, deviation = statistics.fmean(passes), statistics.pstdev(passes)
    of_subset = [(p - mean) / deviation for p in passes]
    return [
        statistics.fmean(a for a, subset in zip(of_subset, subsets, strict=True) if i in subset)
        for i in range(len(rewards))
    ]


def reference_clip_filter(groups: list[list[float]], lengths: list[list[int]], std: str) -> list[float]:
    differing = [g for g in groups if len(set(g)) > 1]
    weight = min(3.0, len(groups) / max(len(differing), 1))
    return [weight * a for a in by_group(reference_dr_grpo)(groups, lengths, std)]


def standardised(values: list[float], std: str) -> list[float]:
    if len(set(values)) < 2:
        return [0.0] * len(values)
    mean, deviation = statistics.fmean(values), spread(values, std)
    return [(v - mean) / (deviation + STD_FLOOR) for v in values]


def reference_global_std(groups: list[list[float]], lengths: list[list[int]], std: str) -> list[float]:
    """Flow-GRPO: centred by group, divided by the deviation of the whole batch."""
    deviation = spread([r for g in groups for r in g], std)
    return [a / (deviation + STD_FLOOR) for a in by_group(reference_dr_grpo)(groups, lengths, std)]


REFERENCES: dict[str, Reference] = {
    "grpo": by_group(reference_grpo),
    "grpo_global_std": reference_global_std,
    "dr_grpo": by_group(reference_dr_grpo),
    "rloo": by_group(reference_rloo),
    "reinforce": lambda groups, lengths, std: [r for g in groups for r in g],
    "reinforce_batch": lambda groups, lengths, std: [
        r - statistics.fmean(x for g in groups for x in g) for g in groups for r in g
    ],
    "reinforce_pp": lambda groups, lengths, std: standardised([r for g in groups for r in g], std),
    "reinforce_pp_baseline": lambda groups, lengths, std: standardised(
        by_group(reference_dr_grpo)(groups, lengths, std), std
    ),
    "opo": by_group(reference_opo),
    "cpgd": by_group(partial(reference_grpo, floor=1e-6)),
    "cpgd_clip_filter": reference_clip_filter,
    "gdpo": lambda groups, lengths, std: standardised(by_group(reference_grpo)(groups, lengths, std), std),
    "pass_at_k": by_group(reference_pass_at_k),
    "prompt_stats": by_group(reference_grpo),  # without earlier rewards; with them: below
    "prompt_stats_global_std": reference_global_std,
}


@pytest.mark.parametrize("std", ["population", "unbiased"])
@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_advantage_equals_its_reference(name: str, std: str) -> None:
    """LightRFT defect B2: CPGD's rewards were summed to one number before they were standardised, so A was always 0."""
    rng = random.Random(7)
    for _ in range(30):
        sizes = [rng.randint(1, 6) for _ in range(rng.randint(1, 5))]
        scale = rng.choice([1.0, 1e6, 1e-3])
        groups = [[scale * rng.choice([0.0, 1.0, rng.random()]) for _ in range(n)] for n in sizes]
        lengths = [[rng.randint(1, 50) for _ in range(n)] for n in sizes]
        found = ADVANTAGES[name](step(groups, lengths), AdvantageOptions(std, 2, 1.0))
        assert found.tolist() == pytest.approx(REFERENCES[name](groups, lengths, std), rel=1e-5, abs=1e-6 * scale)


@pytest.mark.parametrize("std", ["population", "unbiased"])
@pytest.mark.parametrize("name", ["prompt_stats", "prompt_stats_global_std"])
def test_statistics_of_a_prompt_hold_both_of_its_groups_and_what_it_had_before(name: str, std: str) -> None:
    """Flow-GRPO's tracker in plain Python: rewards are appended to the list of their prompt, then compared with it."""
    rng = random.Random(3)
    groups = [[rng.random() for _ in range(n)] for n in (3, 2, 1, 4)]
    prompts = ["a", "b", "a", "c"]  # of the groups
    before = {"a": [0.9, 0.1, 0.4], "c": [0.2]}
    rewards = step(groups)
    found = ADVANTAGES[name](
        dataclasses.replace(
            rewards,
            prompt_ids=torch.tensor([0, 0, 0, 1, 1, 0, 2, 2, 2, 2]),
            earlier=EarlierRewards(torch.tensor([0.9, 0.2, 0.1, 0.4]).double(), torch.tensor([0, 2, 0, 0])),
        ),
        AdvantageOptions(std, 2, 1.0),
    )
    stats = {name: list(values) for name, values in before.items()}
    for prompt, group in zip(prompts, groups, strict=True):
        stats.setdefault(prompt, []).extend(group)
    everything = [r for group in groups for r in group]
    expected = [
        (r - statistics.fmean(stats[prompt]))
        / (spread(everything if name.endswith("global_std") else stats[prompt], std) + STD_FLOOR)
        for prompt, group in zip(prompts, groups, strict=True)
        for r in group
    ]
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


def test_a_group_of_equal_rewards_is_compared_with_what_its_prompt_had_before() -> None:
    rewards = step([[0.5, 0.5]])
    better = dataclasses.replace(rewards, earlier=EarlierRewards(torch.zeros(2).double(), torch.tensor([0, 0])))
    same = dataclasses.replace(rewards, earlier=EarlierRewards(torch.full((2,), 0.5).double(), torch.tensor([0, 0])))
    assert ADVANTAGES["prompt_stats"](better, OPTIONS).min() > 0.8
    assert ADVANTAGES["prompt_stats"](same, OPTIONS).tolist() == [0.0, 0.0]


def test_gdpo_standardises_each_component_before_the_weighted_sum() -> None:
    """Two components of very different scale count by their weight alone."""
    first, second, weights = [[1.0, 0.0, 0.5], [0.0, 1.0]], [[100.0, 300.0, 200.0], [0.0, 0.0]], (0.25, 2.0)
    rewards = step(first)
    components = torch.tensor([[a, b] for g, h in zip(first, second, strict=True) for a, b in zip(g, h, strict=True)])
    rewards = dataclasses.replace(rewards, components=components, weights=torch.tensor([weights] * 5))
    apart = [by_group(reference_grpo)(part, part, "unbiased") for part in (first, second)]
    total = [weights[0] * a + weights[1] * b for a, b in zip(*apart, strict=True)]
    assert ADVANTAGES["gdpo"](rewards, OPTIONS).tolist() == pytest.approx(standardised(total, "unbiased"), abs=1e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_siblings_are_found_by_id_wherever_they_stand(name: str) -> None:
    """LightRFT defects B2 and B16: groups were taken by position, and uneven batches were split wrongly."""
    groups = [[0.0, 1.0, 0.5], [1.0, 7.0, 9.0, 0.0], [1.0, 0.0]]
    together = step(groups, [[3, 4, 5], [6, 7, 8, 9], [1, 2]])
    order = torch.tensor([3, 0, 7, 4, 8, 1, 5, 2, 6])
    of_responses = {name: value for name, value in vars(together).items() if name != "earlier"}
    mixed = dataclasses.replace(together, **{name: value[order] for name, value in of_responses.items()})
    torch.testing.assert_close(ADVANTAGES[name](mixed, OPTIONS), ADVANTAGES[name](together, OPTIONS)[order])


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_excluded_sibling_changes_nothing_and_gets_nothing(name: str) -> None:
    whole = step([[1.0, 0.0, math.nan, 0.5], [0.0, 1.0]], [[1, 2, 9, 3], [4, 5]])
    included = torch.tensor([True, True, False, True, True, True])
    found = ADVANTAGES[name](dataclasses.replace(whole, included=included), OPTIONS)
    without = ADVANTAGES[name](step([[1.0, 0.0, 0.5], [0.0, 1.0]], [[1, 2, 3], [4, 5]]), OPTIONS)
    torch.testing.assert_close(found[included], without)
    assert found[2] == 0


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_a_group_with_nothing_to_compare_has_advantage_zero(name: str) -> None:
    """LightRFT defect B14: the standard deviation of one response was NaN."""
    for std in ("population", "unbiased"):
        for values in ([0.7], [0.1, 0.1, 0.1], [1e9] * 4, [1 / 3] * 7):
            found = ADVANTAGES[name](step([values]), AdvantageOptions(std, 2, 1.0))
            assert found.tolist() == [0.0] * len(values), (std, values)


@pytest.mark.parametrize("name", ["reinforce_batch", "reinforce_pp"])
@pytest.mark.parametrize("groups", [[[0.7]], [[0.1, 0.1], [0.1]]])
def test_a_step_with_nothing_to_compare_has_advantage_zero(name: str, groups: list[list[float]]) -> None:
    assert ADVANTAGES[name](step(groups), OPTIONS).abs().max() == 0


@pytest.mark.parametrize("name", ADVANTAGES)
def test_no_included_response_gives_zeros(name: str) -> None:
    whole = step([[1.0, 0.0]])
    nothing = torch.zeros(2, dtype=torch.bool)
    found = ADVANTAGES[name](dataclasses.replace(whole, included=nothing), OPTIONS)
    assert found.tolist() == [0.0, 0.0]


def test_the_opo_baseline_has_the_least_length_weighted_variance() -> None:
    """The paper's derivation: b minimises sum_i L_i (r_i - b)^2."""
    rewards, lengths = [1.0, 0.0, 0.3], [10, 50, 3]
    baseline = 1.0 - ADVANTAGES["opo"](step([rewards], [lengths]), OPTIONS)[0].item()

    def variance(b: float) -> float:
        return sum(n * (r - b) ** 2 for n, r in zip(lengths, rewards, strict=True))

    assert all(variance(baseline) < variance(baseline + shift) for shift in (-1e-3, 1e-3))


def test_whitening_reads_included_values_alone() -> None:
    """LightRFT defect B14: the mean included masked tokens."""
    values, included = torch.tensor([1.0, math.inf, 3.0, math.nan]), torch.tensor([True, False, True, False])
    expected = standardised([1.0, 3.0], "unbiased")
    assert whitened(values, included, "unbiased").tolist() == pytest.approx([expected[0], 0.0, expected[1], 0.0])


@pytest.mark.parametrize("ngram", [2, 3, 4])
def test_the_repeated_share_counts_ngrams_seen_before(ngram: int) -> None:
    rng = random.Random(0)
    for _ in range(50):
        tokens = [rng.randint(0, 2) for _ in range(rng.randint(0, 20))]
        grams = [tuple(tokens[i : i + ngram]) for i in range(len(tokens) - ngram + 1)]
        repeated = sum(gram in grams[:i] for i, gram in enumerate(grams))
        assert repeated_share(tokens, ngram) == pytest.approx(repeated / len(grams) if grams else 0.0)


def test_length_rewards_are_kimis_within_each_group() -> None:
    lengths, solved = torch.tensor([10, 20, 30, 10, 20, 7]), torch.tensor([True, False, True, False, True, True])
    included = torch.tensor([True, True, True, True, True, False])
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    # of the longest in group 0: 0.5 - 1; an unsolved response gains nothing from being short
    assert length_rewards(lengths, solved, included, groups).tolist() == [0.5, 0.0, -0.5, 0.0, -0.5, 0.0]
    equal = torch.full_like(lengths, 5)
    assert length_rewards(equal, solved, included, groups).tolist() == [0.0] * 6


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_the_return_of_a_token_is_the_discounted_sum_of_what_follows(gamma: float) -> None:
    """LightRFT defect B11: gamma was used on the first micro-batch only. Here it is an argument of each response."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        num = int(rng.integers(1, 9))
        costs, mask = rng.normal(size=num).astype(np.float32), rng.random(num) < 0.7
        found = credit_by_token(2.0, costs, mask, gamma)
        if not mask.any():
            assert found.tolist() == [0.0] * num
            continue
        last = max(t for t in range(num) if mask[t])
        rewards = [(-float(costs[t]) if mask[t] else 0.0) + (2.0 if t == last else 0.0) for t in range(num)]
        expected = [sum(gamma ** (k - t) * rewards[k] for k in range(t, num)) for t in range(num)]
        assert found.tolist() == pytest.approx(expected, abs=1e-5)


def test_running_moments_are_those_of_everything_so_far() -> None:
    rng = random.Random(1)
    moments, seen = RunningMoments(), []
    for _ in range(10):
        batch = [rng.gauss(5.0, 2.0) for _ in range(rng.randint(1, 7))]
        moments.add(torch.tensor(batch, dtype=torch.float64))
        seen += batch
        assert moments.mean == pytest.approx(statistics.fmean(seen))
        if len(seen) > 1:
            assert moments.scale == pytest.approx(statistics.stdev(seen))


@pytest.mark.parametrize("batch", [[3.0], [0.1] * 5, []])
def test_moments_of_nothing_to_compare_leave_rewards_as_they_are(batch: list[float]) -> None:
    """LightRFT defect B13: the deviation was infinite after one sample, and 8e-13 after a constant first batch, which
    made rewards 1e12."""
    moments = RunningMoments()
    moments.add(torch.tensor(batch))
    assert moments.scale == 1.0


def test_moments_do_not_depend_on_the_order_of_batches_and_skip_what_is_not_finite() -> None:
    """LightRFT defect B13: moments were those of one rank, in its own order."""
    first, second = torch.tensor([1.0, 2.0, float("nan")]), torch.tensor([7.0, float("inf")])
    one, other = RunningMoments(), RunningMoments()
    for moments, batches in ((one, (first, second)), (other, (second, first))):
        for batch in batches:
            moments.add(batch)
    assert one.state() == pytest.approx(other.state()) and one.count == 3


def test_moments_go_on_from_their_state() -> None:
    moments, again = RunningMoments(), RunningMoments()
    moments.add(torch.tensor([1.0, 2.0, 4.0]))
    again.load(moments.state())
    for one in (moments, again):
        one.add(torch.tensor([9.0]))
    assert again.state() == moments.state()
