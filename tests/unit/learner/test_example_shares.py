"""Each rank fetches the examples that it takes through the model, of an offline job and of the warm start."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_data import image, prompt, tiny_config
from offline_rows import config_of, rows
from ranks_in_threads import RanksInThreads, Store, Stored
from transformers import AutoTokenizer

from mobula.cluster.records.actions import TokenActions
from mobula.cluster.records.media import MediaReader
from mobula.cluster.records.trajectory import Prompt, ScoredGroup
from mobula.configs.schema import RunConfig
from mobula.learner import examples
from mobula.learner import examples as entries
from mobula.learner.examples import (
    DataRows,
    Example,
    ExampleOutline,
    SharedExample,
    StoredExample,
    TaughtExamples,
    collate_examples,
    fetch_examples,
    planners_of,
    portions_of_examples,
    stored_examples,
    totals_of,
)
from mobula.learner.gradient_step import shares_of_ranks
from mobula.learner.offline import build_objective
from mobula.learner.policies.flow.policy import CleanSequence, Noising
from mobula.learner.policies.head import PLAIN
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl
from mobula.learner.shares import ELSEWHERE, Exchange, Portion, ShareFetcher, in_portions

Parts = list[list[SharedExample]]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    monkeypatch.setattr(examples, "fetch_or_miss", store.fetch)
    return store


def fetched(
    config: RunConfig, num_ranks: int, store: Store, parts: list[list[ScoredGroup]], unlucky: int | None = None
) -> list[Parts]:
    """What each rank gets."""
    row = build_objective(config, PLAIN).row
    ranks = RanksInThreads(num_ranks, store)

    def fetch(rank: int, exchange: Exchange) -> Parts:
        entries = DataRows(parts, config, row)
        return entries.in_parts(ShareFetcher(rank, num_ranks, exchange).fetch(entries))

    return ranks.each(fetch, unlucky)


def own_rows(part: list[SharedExample], config: RunConfig, rank: int, num_ranks: int) -> list[list[int]]:
    """The places in a part of the rows of each of its micro-batches."""
    shares = shares_of_ranks(part, config.learner, num_ranks)[rank]
    places = {id(example): n for n, example in enumerate(part)}
    return [[places[id(example)] for example in share if id(example) in places] for share in shares]


@pytest.mark.parametrize("job", ["sft", "dpo", "reward_model", "regression"])
def test_each_rank_has_its_share_whole_and_the_totals_of_all(folder: Path, tokenizer, store: Store, job: str) -> None:
    config = config_of(folder, job, "learner.tokens_per_microbatch=120")
    parts = [rows(tokenizer, job, num=7, seed=1), rows(tokenizer, job, num=4, seed=2)]
    row = build_objective(config, PLAIN).row
    expected = [fetch_examples(part, row, 1.0) for part in parts]
    found = fetched(config, 3, store, [store.put(part) for part in parts])
    for rank, theirs in enumerate(found):
        for part, whole in zip(theirs, expected, strict=True):
            assert totals_of(part) == totals_of(whole)
            shares = own_rows(part, config, rank, 3)
            assert shares == own_rows(whole, config, rank, 3), "rows are shared out as with all of them at hand"
            for n in (n for share in shares for n in share):
                mine = part[n]
                assert isinstance(mine, Example)
                for one, other in zip(mine.candidates, whole[n].candidates, strict=True):
                    np.testing.assert_array_equal(one.sequence.token_ids, other.sequence.token_ids, strict=True)
                    np.testing.assert_array_equal(one.mask, other.mask, strict=True)
                    assert one.label == other.label
    assert not all(isinstance(example, Example) for part in found[0] for example in part)


def test_two_ranks_fetch_each_row_once(folder: Path, tokenizer, store: Store) -> None:
    """Prompts are not shared here: that two rows have the same one is known once they are fetched."""
    stored = store.put(rows(tokenizer, "dpo", num=40))
    total = sum(len(g.group.content) + len(g.reference_logprobs.content) for g in stored)
    fetched(config_of(folder, "dpo", "learner.share_prompts=false"), 2, store, [stored])
    assert len(store.num_bytes) == 2 and sum(store.num_bytes.values()) == total
    assert max(store.num_bytes.values()) < 0.7 * total


def fetched_in_portions(
    config: RunConfig, job: str, num_ranks: int, store: Store, rows: list[ScoredGroup]
) -> tuple[list[Parts], list[Sequence[Portion]]]:
    """What each rank gets from its references, and the portions of each call."""
    row, calls = build_objective(config, PLAIN).row, []

    async def call(outlines: Sequence[ScoredGroup], portions: Sequence[Portion]) -> list[Parts]:
        calls.append(portions)

        def fetch(rank: int, exchange: Exchange) -> Parts:
            entries = DataRows([outlines], config, row, portions[rank])
            return entries.in_parts(ShareFetcher(rank, num_ranks, exchange).fetch(entries))

        found = RanksInThreads(num_ranks, store).each(fetch)
        if isinstance(found[0], Exception):
            raise found[0]
        return found

    planned = planners_of(config).groups
    found = asyncio.run(in_portions(call, rows, 1, num_ranks=num_ranks, planned=planned, put=lambda value: value))
    return found, calls


@pytest.mark.parametrize("job", ["sft", "dpo", "reward_model", "regression"])
def test_a_rank_receives_the_references_of_its_rows_alone(folder: Path, tokenizer, store: Store, job: str) -> None:
    """The sizes that summaries predict are exact: one call."""
    config = config_of(folder, job, "learner.tokens_per_microbatch=120", "learner.share_prompts=false")
    stored = store.put(rows(tokenizer, job, num=12, seed=1))
    found, [portions] = fetched_in_portions(config, job, 3, store, stored)
    assert sum(len(portion.references) for portion in portions) < 1.5 * len(stored)
    assert set().union(*(portion.references for portion in portions)) == set(range(len(stored)))
    [everything] = fetched(config, 1, store, [stored])
    for rank, [mine] in enumerate(found):
        assert totals_of(mine) == totals_of(everything[0])
        assert own_rows(mine, config, rank, 3) == own_rows(everything[0], config, rank, 3)
        whole = {n for n, example in enumerate(mine) if isinstance(example, Example)}
        assert whole == set(portions[rank].references)


def test_rows_with_one_prompt_are_assigned_again_once_that_is_known(folder: Path, tokenizer, store: Store) -> None:
    config = config_of(folder, "sft", "learner.packing=true", "learner.share_prompts=true")
    groups = rows(tokenizer, "sft", num=12, seed=1)
    repeated = [with_prompt(scored, groups[n % 3].group.prompt) for n, scored in enumerate(groups)]
    found, calls = fetched_in_portions(config, "sft", 2, store, store.put(repeated))
    assert [all(portion.is_final for portion in portions) for portions in calls] == [False, True]
    [everything] = fetched(config, 1, store, [store.put(repeated)])
    for rank, [mine] in enumerate(found):
        assert own_rows(mine, config, rank, 2) == own_rows(everything[0], config, rank, 2)


def test_a_row_that_one_rank_cannot_fetch_is_missed_by_all_of_them(folder: Path, tokenizer, store: Store) -> None:
    found = fetched(config_of(folder, "sft"), 2, store, [store.put(rows(tokenizer, "sft"))], unlucky=1)
    assert [str(error) for error in found] == ["learner/1: rows cannot be had"] * 2


def test_a_row_of_another_rank_cannot_be_put_into_a_batch(folder: Path, tokenizer, store: Store) -> None:
    [part], _ = fetched(config_of(folder, "sft"), 2, store, [store.put(rows(tokenizer, "sft"))])
    outlined = [example for example in part if not isinstance(example, Example)]
    with pytest.raises(AssertionError, match="an example of another rank"):
        collate_examples(outlined[:1], MediaReader(timeout_s=1, max_items=1), torch.device("cpu"))


@pytest.mark.parametrize("job", ["sft", "dpo", "reward_model"])
def test_examples_of_one_prompt_compute_it_once(folder: Path, tokenizer, store: Store, job: str) -> None:
    """Eight rows with four prompts, two of which are equal; a pair has its prompt once."""
    config = config_of(folder, job, "learner.packing=true", "learner.share_prompts=true")
    groups = rows(tokenizer, job, num=8, seed=1)
    repeated = [with_prompt(scored, groups[n // 2].group.prompt) for n, scored in enumerate(groups)]
    row = build_objective(config, PLAIN).row
    whole = fetch_examples(repeated, row, 1.0)
    assert [len({example.group for example in whole[n : n + 2]}) for n in range(0, 8, 2)] == [1] * 4
    assert len({example.group for example in whole}) == 3
    for example, scored in zip(whole, repeated, strict=True):
        size, prompt = example.sequence, scored.group.prompt.num_tokens
        lengths = [candidate.sequence.num_tokens for candidate in example.candidates]
        assert (size.num_prompt_tokens, size.answers) == (prompt, tuple(num - prompt for num in lengths))
    [found, _] = fetched(config, 2, store, [store.put(repeated)])
    assert [example.group for example in found[0]] == [example.group for example in whole]


def with_prompt(scored: ScoredGroup, prompt: Prompt) -> ScoredGroup:
    return replace(scored, group=replace(scored.group, prompt=prompt))


NUM_RANKS = 3


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny"), seed=0)
    return tiny_config(folder, "learner.tokens_per_microbatch=120")


@pytest.fixture(scope="module")
def examples_of_taught_shares(config: RunConfig) -> list[Example]:
    """Answers of many lengths, part of them after an image, some tokens not trained."""
    tokenizer, rng = AutoTokenizer.from_pretrained(config.policy.model), np.random.default_rng(0)
    made = []
    for n in range(11):
        answer = rng.integers(1, 250, size=rng.integers(2, 60)).astype(np.int32)
        asked = prompt(tokenizer, f"row {n}", [image(n)] if n % 3 == 0 else [])
        made.append(Example.of_answer(asked, TokenActions(answer), answer > 50))
    return made


@pytest.fixture
def store_of_taught_shares(monkeypatch: pytest.MonkeyPatch) -> Store:
    store_of_taught_shares = Store()
    monkeypatch.setattr(entries, "fetch_or_miss", store_of_taught_shares.fetch)
    return store_of_taught_shares


def put(value: object) -> Stored:
    return Stored(pickle.dumps(value))


def fetched_of_taught_shares(
    config: RunConfig, store_of_taught_shares: Store, stored: Sequence[StoredExample], unlucky: int | None = None
) -> list:
    """What each rank gets."""

    def fetch(rank: int, exchange: Exchange) -> list[SharedExample]:
        entries = TaughtExamples(stored, config)
        return ShareFetcher(rank, NUM_RANKS, exchange).fetch(entries)

    return RanksInThreads(NUM_RANKS, store_of_taught_shares).each(fetch, unlucky)


def test_each_rank_has_its_share_whole_and_the_counts_of_all(
    config: RunConfig, examples_of_taught_shares: list[Example], store_of_taught_shares: Store
) -> None:
    shares = shares_of_ranks(examples_of_taught_shares, config.learner, NUM_RANKS)
    places = {id(example.candidates[0].sequence): n for n, example in enumerate(examples_of_taught_shares)}
    for rank, found in enumerate(
        fetched_of_taught_shares(config, store_of_taught_shares, stored_examples(examples_of_taught_shares, put))
    ):
        assert [row.num_trained for row in found] == [row.num_trained for row in examples_of_taught_shares]
        assert [row.sequence.num_tokens for row in found] == [
            row.sequence.num_tokens for row in examples_of_taught_shares
        ]
        own = shares_of_ranks(found, config.learner, NUM_RANKS)[rank]
        assert [len(share) for share in own] == [len(share) for share in shares[rank]]
        for mine, whole in zip(own, shares[rank], strict=True):
            for row, expected in zip(mine, whole, strict=True):
                assert isinstance(row, Example)
                [mine_only], [expected_only] = row.candidates, expected.candidates
                np.testing.assert_array_equal(
                    mine_only.sequence.token_ids, expected_only.sequence.token_ids, strict=True
                )
                np.testing.assert_array_equal(mine_only.mask, expected_only.mask, strict=True)
        taken = {places[id(row.candidates[0].sequence)] for share in shares[rank] for row in share}
        assert {n for n, row in enumerate(found) if isinstance(row, Example)} == taken


def test_each_example_is_fetched_once(
    config: RunConfig, examples_of_taught_shares: list[Example], store_of_taught_shares: Store
) -> None:
    stored = stored_examples(examples_of_taught_shares, put)
    total = sum(len(example.content.content) for example in stored)
    found = fetched_of_taught_shares(config, store_of_taught_shares, stored)
    num_whole = sum(isinstance(row, Example) for rows in found for row in rows)
    assert len(examples_of_taught_shares) <= num_whole <= len(examples_of_taught_shares) + NUM_RANKS, (
        "a row that keeps step with other ranks comes twice"
    )
    assert sum(store_of_taught_shares.num_bytes.values()) < 1.5 * total


def test_a_rank_receives_the_references_of_its_examples_alone(
    config: RunConfig, examples_of_taught_shares: list[Example], store_of_taught_shares: Store
) -> None:
    stored = stored_examples(examples_of_taught_shares, put)
    outlines, portions = portions_of_examples(stored, NUM_RANKS, config=config)
    assert all(outline.content is ELSEWHERE for outline in outlines)
    assert sum(len(portion.references) for portion in portions) <= len(examples_of_taught_shares) + NUM_RANKS

    def fetch(rank: int, exchange: Exchange) -> list[SharedExample]:
        entries = TaughtExamples(outlines, config, portions[rank])
        return ShareFetcher(rank, NUM_RANKS, exchange).fetch(entries)

    found, expected = (
        RanksInThreads(NUM_RANKS, store_of_taught_shares).each(fetch),
        fetched_of_taught_shares(config, store_of_taught_shares, stored),
    )
    for mine, whole in zip(found, expected, strict=True):
        assert [type(row) for row in mine] == [type(row) for row in whole]


def test_an_example_that_one_rank_cannot_fetch_is_missed_by_all_of_them(
    config: RunConfig, examples_of_taught_shares: list[Example], store_of_taught_shares: Store
) -> None:
    found = fetched_of_taught_shares(
        config, store_of_taught_shares, stored_examples(examples_of_taught_shares, put), unlucky=2
    )
    assert [str(error) for error in found] == ["learner/2: examples of the warm start cannot be had"] * NUM_RANKS


def test_images_are_shared_out_as_answers_are(config: RunConfig, store_of_taught_shares: Store) -> None:
    noising = Noising(np.linspace(1, 0.1, 10, dtype=np.float32), np.arange(10, dtype=np.float32), "uniform", 2)
    images = [Example.of_image(CleanSequence(np.full((4, 8, 8), n, np.float32), (), noising, n)) for n in range(6)]
    for found in fetched_of_taught_shares(config, store_of_taught_shares, stored_examples(images, put)):
        whole = [row for row in found if isinstance(row, Example)]
        assert len(whole) == 2 and sum(isinstance(row, ExampleOutline) for row in found) == 4
        assert all(of.sequence.clean[0, 0, 0] == of.sequence.seed for row in whole for of in row.candidates)
