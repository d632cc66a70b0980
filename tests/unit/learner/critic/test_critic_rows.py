"""ValueRow: one more value than tokens, and nothing that the added token changes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_data import group, prompt, random_groups
from transformers import AutoTokenizer

from mobula.cluster.records.media import MediaReader
from mobula.learner.batch import LearnerItem, fetch_items
from mobula.learner.critic.rows import ValueRow, collate_rows
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    folder: Path = write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny"), seed=0)
    return AutoTokenizer.from_pretrained(folder)


def collated(items: list[LearnerItem]):
    return collate_rows([ValueRow.of(i) for i in items], MediaReader(timeout_s=1, max_items=8), torch.device("cpu"))


def test_a_row_has_the_tokens_of_its_item_and_one_more(tokenizer) -> None:
    for items in fetch_items(random_groups(tokenizer, 3, 2), 0, 1.0):
        for item in items:
            row = ValueRow.of(item)
            assert row.sequence.num_targets == item.sequence.num_targets + 1
            assert row.sequence.num_context == item.sequence.num_context
            assert row.sequence.token_ids[:-1].tolist() == item.sequence.token_ids.tolist()
            assert row.sequence.media == item.sequence.media


def test_columns_are_as_wide_as_the_values_and_padding_has_no_loss(tokenizer) -> None:
    [items] = fetch_items([group(prompt(tokenizer, "a"), [[1, 2, 3], [4]], [1.0, 0.0])], 0, 1.0)
    valued = [
        dataclasses.replace(
            item,
            values=np.arange(1, item.sequence.num_targets + 2, dtype=np.float32),
            returns=np.full(item.sequence.num_targets, 7, dtype=np.float32),
        )
        for item in items
    ]
    batch = collated(valued)
    assert batch.old_values.tolist() == [[1, 2, 3, 4], [1, 2, 0, 0]]
    assert batch.returns.tolist() == [[7, 7, 7, 0], [7, 0, 0, 0]]
    assert batch.mask.tolist() == [[True] * 3 + [False], [True] + [False] * 3]
    assert batch.tokens.targets.shape == (2, 4)


def test_before_it_has_values_a_row_is_scored_alone(tokenizer) -> None:
    [items] = fetch_items([group(prompt(tokenizer, "a"), [[1, 2]], [1.0])], 0, 1.0)
    batch = collated(items)
    assert batch.old_values.tolist() == [[0.0] * 3] and batch.returns.tolist() == [[0.0] * 3]


def test_an_empty_response_has_the_value_of_its_prompt(tokenizer) -> None:
    [items] = fetch_items([group(prompt(tokenizer, "a"), [[], [5]], [1.0, 0.0])], 0, 1.0)
    assert ValueRow.of(items[0]).sequence.num_targets == 1
    assert collated(items).mask.tolist() == [[False, False], [True, False]]


def test_what_is_filtered_or_untrained_has_no_value_loss(tokenizer) -> None:
    [[item]] = fetch_items([group(prompt(tokenizer, "a"), [[1, 2]], [1.0])], 0, 1.0)
    assert not ValueRow.of(item.without_loss()).mask.any()
    assert not ValueRow.of(item).untrained().mask.any() and ValueRow.of(item).mask.all()
