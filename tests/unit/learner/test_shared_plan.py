"""Micro-batches in which siblings compute their prompt once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mobula.configs.load import load_config
from mobula.configs.schema import LearnerConfig
from mobula.learner.policies.base import RowOutline
from mobula.learner.policies.packing import MIN_FILL, Microbatch, split_microbatches

BUDGET = 100
Group = tuple[int, list[int]]  # tokens of the prompt, and of each response


LOADED = load_config(["experiment=digits", "learner.packing=true"]).learner


def config(*, budget: int = BUDGET, shares: bool = True, attention: float = 0.0) -> LearnerConfig:
    settings = {"tokens_per_microbatch": budget, "share_prompts": shares, "attention_token_cost": attention}
    return LOADED.model_copy(update=settings)


def rows_of(groups: Sequence[Group]) -> tuple[list[RowOutline], list[int]]:
    """The rows of all groups, and the group of each."""
    rows = [(n, RowOutline(own, prompt, (own,), 0, ())) for n, (prompt, owns) in enumerate(groups) for own in owns]
    return [row for _, row in rows], [n for n, _ in rows]


def computed(batch: Microbatch, rows: Sequence[RowOutline], groups: Sequence[int]) -> int:
    """Tokens of a micro-batch, each prompt once."""
    prompts = {groups[i]: rows[i].num_prompt_tokens for i in batch}
    return sum(prompts.values()) + sum(sum(rows[i].answers) for i in batch)


GROUPS = st.lists(
    st.tuples(st.integers(1, 70), st.lists(st.integers(0, 60), min_size=1, max_size=8)), min_size=1, max_size=12
)


@given(GROUPS, st.integers(1, 5), st.booleans())
@settings(max_examples=200, deadline=None)
def test_every_row_is_in_one_microbatch_within_the_bound(groups: list[Group], num_ranks: int, shares: bool) -> None:
    rows, of = rows_of(groups)
    plan = split_microbatches(rows, config(shares=shares), num_ranks, of)
    assert len(plan) == num_ranks and len({len(share) for share in plan}) == 1
    assert sorted(i for share in plan for batch in share for i in batch) == list(range(len(rows)))
    for batch in (batch for share in plan for batch in share if len(batch) > 1):
        num_tokens = computed(batch, rows, of) if shares else sum(rows[i].num_tokens for i in batch)
        assert num_tokens <= BUDGET


@given(GROUPS)
@settings(max_examples=200, deadline=None)
def test_a_prompt_is_computed_as_rarely_as_the_bound_allows(groups: list[Group]) -> None:
    """A group that fits is divided only to fill a micro-batch with many times the tokens of its prompt."""
    rows, of = rows_of(groups)
    [plan] = split_microbatches(rows, config(), 1, of)
    for n, (prompt, owns) in enumerate(groups):
        num_batches = sum(n in {of[i] for i in batch} for batch in plan)
        [alone] = split_microbatches(rows_of([(prompt, owns)])[0], config(), 1, [0] * len(owns))
        assert num_batches <= len(alone) + (MIN_FILL * prompt <= BUDGET)


def test_a_group_longer_than_a_microbatch_has_its_prompt_in_each() -> None:
    rows, of = rows_of([(60, [15] * 8)])
    [plan] = split_microbatches(rows, config(), 1, of)
    assert [len(batch) for batch in plan] == [2, 2, 2, 2]


def test_the_rest_of_a_microbatch_is_filled_if_the_prompt_is_short() -> None:
    rows, of = rows_of([(2, [12] * 5), (2, [12] * 5)])
    [plan] = split_microbatches(rows, config(), 1, of)
    assert [len(batch) for batch in plan] == [8, 2]
    rows, of = rows_of([(10, [10] * 5), (10, [10] * 5)])
    [plan] = split_microbatches(rows, config(), 1, of)
    assert [len(batch) for batch in plan] == [5, 5]


def loads(plan: list[list[Microbatch]], rows: Sequence[RowOutline], of: Sequence[int], attention: float) -> list[float]:
    def cost(batch: Microbatch) -> float:
        prompts = {of[i]: rows[i].num_prompt_tokens for i in batch}
        own = sum(sum(rows[i].answers) * (1 + attention * rows[i].num_tokens) for i in batch)
        return own + sum(num * (1 + attention * num) for num in prompts.values())

    return [sum(map(cost, share)) for share in plan]


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("attention", [0.0, 1e-3])
def test_ranks_compute_alike_although_some_prompts_and_responses_are_long(num_ranks: int, attention: float) -> None:
    """An eighth of the prompts and of the responses is eight times as long as the others."""
    rng = np.random.default_rng(num_ranks)
    groups = []
    for n in range(8 * num_ranks):
        prompt = int(rng.integers(100, 200) * (8 if n % 8 == 0 else 1))
        groups.append((prompt, [int(rng.integers(20, 60) * (8 if i == 0 else 1)) for i in range(8)]))
    rows, of = rows_of(groups)
    plan = split_microbatches(rows, config(attention=attention, budget=4000), num_ranks, of)
    [least] = loads(split_microbatches(rows, config(budget=4000), 1, of), rows, of, attention)
    assert max(loads(plan, rows, of, attention)) <= 1.1 * least / num_ranks
    assert sum(len({of[i] for batch in share for i in batch}) for share in plan) == len(groups), "no group is divided"


def test_a_group_is_divided_over_ranks_where_they_would_be_unequal() -> None:
    rows, of = rows_of([(40, [100] * 8)])
    plan = split_microbatches(rows, config(budget=10_000), 2, of)
    assert [[len(batch) for batch in share] for share in plan] == [[4], [4]]


def test_one_response_a_prompt_is_packed_as_without_sharing() -> None:
    rng = np.random.default_rng(0)
    rows, of = rows_of([(int(rng.integers(1, 60)), [int(rng.integers(1, 60))]) for _ in range(40)])
    plans = [split_microbatches(rows, config(shares=shares), 3, of) for shares in (True, False)]
    first, second = ([[sorted(batch) for batch in share] for share in plan] for plan in plans)
    assert first == second


def test_a_prompt_that_is_short_beside_its_responses_counts_in_each_row() -> None:
    """The layout shares no prefix below a sixteenth of a row."""
    rows, of = rows_of([(2, [30, 33, 33])])
    [plan] = split_microbatches(rows, config(), 1, of)
    assert [len(batch) for batch in plan] == [2, 1], "2 + 30 + 35 + 35 tokens"
