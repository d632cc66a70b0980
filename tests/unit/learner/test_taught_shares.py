"""Of a warm start each rank fetches the examples that it takes through the model, and learns what it would of all."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import numpy as np
import pytest
from learner_data import image, prompt, tiny_config
from ranks_in_threads import RanksInThreads, Store, Stored
from transformers import AutoTokenizer

from mobula.configs.schema import RunConfig
from mobula.learner import examples as entries
from mobula.learner.examples import ExampleOutline, StoredExample, TaughtExamples, portions_of_examples, stored_examples
from mobula.learner.gradient_step import shares_of_ranks
from mobula.learner.image_teaching import ImageExample
from mobula.learner.policies.flow.policy import CleanSequence, Noising
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl
from mobula.learner.shares import ELSEWHERE, Exchange, ShareFetcher
from mobula.learner.supervised import SharedSupervised, SupervisedExample

NUM_RANKS = 3


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny"), seed=0)
    return tiny_config(folder, "learner.tokens_per_microbatch=120")


@pytest.fixture(scope="module")
def examples(config: RunConfig) -> list[SupervisedExample]:
    """Answers of many lengths, part of them after an image, some tokens not trained."""
    tokenizer, rng = AutoTokenizer.from_pretrained(config.policy.model), np.random.default_rng(0)
    made = []
    for n in range(11):
        answer = rng.integers(1, 250, size=rng.integers(2, 60)).astype(np.int32)
        asked = prompt(tokenizer, f"row {n}", [image(n)] if n % 3 == 0 else [])
        made.append(SupervisedExample(asked, answer, answer > 50))
    return made


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    monkeypatch.setattr(entries, "fetch_or_miss", store.fetch)
    return store


def put(value: object) -> Stored:
    return Stored(pickle.dumps(value))


def fetched(config: RunConfig, store: Store, stored: Sequence[StoredExample], unlucky: int | None = None) -> list:
    """What each rank gets."""

    def fetch(rank: int, exchange: Exchange) -> list[SharedSupervised]:
        entries = TaughtExamples(stored, config.learner, 1.0)
        return ShareFetcher(rank, NUM_RANKS, exchange).fetch(entries)

    return RanksInThreads(NUM_RANKS, store).each(fetch, unlucky)


def test_each_rank_has_its_share_whole_and_the_counts_of_all(
    config: RunConfig, examples: list[SupervisedExample], store: Store
) -> None:
    shares = shares_of_ranks(examples, config.learner, NUM_RANKS)
    places = {id(example.answer_ids): n for n, example in enumerate(examples)}
    for rank, found in enumerate(fetched(config, store, stored_examples(examples, put))):
        assert [row.num_trained for row in found] == [row.num_trained for row in examples]
        assert [row.sequence.num_tokens for row in found] == [row.sequence.num_tokens for row in examples]
        own = shares_of_ranks(found, config.learner, NUM_RANKS)[rank]
        assert [len(share) for share in own] == [len(share) for share in shares[rank]]
        for mine, whole in zip(own, shares[rank], strict=True):
            for row, expected in zip(mine, whole, strict=True):
                assert isinstance(row, SupervisedExample)
                np.testing.assert_array_equal(row.answer_ids, expected.answer_ids, strict=True)
                np.testing.assert_array_equal(row.answer_mask, expected.answer_mask, strict=True)
        taken = {places[id(row.answer_ids)] for share in shares[rank] for row in share}
        assert {n for n, row in enumerate(found) if isinstance(row, SupervisedExample)} == taken


def test_each_example_is_fetched_once(config: RunConfig, examples: list[SupervisedExample], store: Store) -> None:
    stored = stored_examples(examples, put)
    total = sum(len(example.content.content) for example in stored)
    found = fetched(config, store, stored)
    num_whole = sum(isinstance(row, SupervisedExample) for rows in found for row in rows)
    assert len(examples) <= num_whole <= len(examples) + NUM_RANKS, "a row that keeps step with other ranks comes twice"
    assert sum(store.num_bytes.values()) < 1.5 * total


def test_a_rank_receives_the_references_of_its_examples_alone(
    config: RunConfig, examples: list[SupervisedExample], store: Store
) -> None:
    stored = stored_examples(examples, put)
    outlines, portions = portions_of_examples(stored, NUM_RANKS, config=config.learner)
    assert all(outline.content is ELSEWHERE for outline in outlines)
    assert sum(len(portion.references) for portion in portions) <= len(examples) + NUM_RANKS

    def fetch(rank: int, exchange: Exchange) -> list[SharedSupervised]:
        entries = TaughtExamples(outlines, config.learner, 1.0, portions[rank])
        return ShareFetcher(rank, NUM_RANKS, exchange).fetch(entries)

    found, expected = RanksInThreads(NUM_RANKS, store).each(fetch), fetched(config, store, stored)
    for mine, whole in zip(found, expected, strict=True):
        assert [type(row) for row in mine] == [type(row) for row in whole]


def test_an_example_that_one_rank_cannot_fetch_is_missed_by_all_of_them(
    config: RunConfig, examples: list[SupervisedExample], store: Store
) -> None:
    found = fetched(config, store, stored_examples(examples, put), unlucky=2)
    assert [str(error) for error in found] == ["learner/2: examples of the warm start cannot be had"] * NUM_RANKS


def test_images_are_shared_out_as_answers_are(config: RunConfig, store: Store) -> None:
    noising = Noising(np.linspace(1, 0.1, 10, dtype=np.float32), np.arange(10, dtype=np.float32), "uniform", 2)
    images = [ImageExample(CleanSequence(np.full((4, 8, 8), n, np.float32), (), noising, n)) for n in range(6)]
    for found in fetched(config, store, stored_examples(images, put)):
        whole = [row for row in found if isinstance(row, ImageExample)]
        assert len(whole) == 2 and sum(isinstance(row, ExampleOutline) for row in found) == 4
        assert all(row.sequence.clean[0, 0, 0] == row.sequence.seed for row in whole)
