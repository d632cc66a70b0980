"""Values of a critic: its model, and rows with one value more than tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_data import group, image, prompt, random_groups, tiny_config
from scored_rows import tree
from tiny_checkpoints import write_text_policy
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from mobula.cluster.records.media import MediaReader
from mobula.configs.schema import RunConfig
from mobula.learner.batch import LearnerItem, fetch_items
from mobula.learner.critic import ScalarHead, ValueModel, ValueRow, collate_rows
from mobula.learner.policies.batch import TokenSequence, collate
from mobula.learner.policies.checkpoint import load_policy_model
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def checkpoint(request, tmp_path_factory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny"), seed=0, tie_word_embeddings=request.param)


@pytest.fixture
def model(checkpoint: Path) -> ValueModel:
    return value_model(tiny_config(checkpoint))


def value_model(config: RunConfig) -> ValueModel:
    return ValueModel(load_policy_model(config.policy, torch.float32), config.learner, seed=3).eval()


def sequences(checkpoint: Path) -> list[TokenSequence]:
    """Text, one image, and two images of different sizes, with answers of different lengths."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    shown = [[], [image(1)], [image(2, 2, 4), image(3, 6, 4)]]
    answers = [[1, 2, 3], [4], [10, 11, 12, 13, 14]]
    return [
        TokenSequence.of_response(prompt(tokenizer, f"p{n}", images), np.array(answer))
        for n, (images, answer) in enumerate(zip(shown, answers, strict=True))
    ]


def values(model: ValueModel, rows: list[TokenSequence]) -> torch.Tensor:
    return model(collate(rows, MediaReader(timeout_s=1, max_items=8), CPU))


def plain_states(model, row: TokenSequence) -> torch.Tensor:
    """[T, H]: what transformers' own forward, with its own positions, has before each target."""
    inputs = {"input_ids": torch.from_numpy(row.token_ids.astype(np.int64))[None]}
    if row.media:
        for name in ("pixel_values", "image_grid_thw"):
            inputs[name] = torch.cat([torch.from_numpy(h.reference.inputs[name]) for h in row.media])
        types = torch.zeros_like(inputs["input_ids"])
        for span in row.media_spans:
            types[0, span.start : span.end] = 1
        inputs["mm_token_type_ids"] = types
    states = model(**inputs, output_hidden_states=True).hidden_states[-1][0]
    return states[row.num_context - 1 : -1]


@torch.no_grad()
def test_values_are_those_of_the_plain_forward_for_text_and_images(model, checkpoint) -> None:
    """LightRFT defect B6: the critic had plain positions in the place of M-RoPE's."""
    rows = sequences(checkpoint)
    plain = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).eval()
    found = values(model, rows)
    for row, own in zip(rows, found, strict=True):
        expected = plain_states(plain, row).double() @ model.head.weight[0].double()
        torch.testing.assert_close(own[: row.num_targets].double(), expected, atol=1e-7, rtol=1e-5)
        assert not own[row.num_targets :].any()


@torch.no_grad()
def test_values_of_a_text_family_are_those_of_the_plain_forward(tmp_path: Path) -> None:
    checkpoint = write_text_policy(tmp_path, "qwen3")
    row = TokenSequence(np.array([3, 4, 5, 6]), 2, (), ())
    config = tiny_config(checkpoint)
    model = ValueModel(load_policy_model(config.policy, torch.float32), config.learner, seed=3).eval()
    expected = plain_states(AutoModelForCausalLM.from_pretrained(checkpoint).eval(), row) @ model.head.weight[0]
    torch.testing.assert_close(values(model, [row])[0], expected, atol=1e-7, rtol=1e-5)


@torch.no_grad()
def test_rows_that_share_prefixes_have_the_values_of_single_rows(model, checkpoint) -> None:
    """With one value after the last token of each row."""
    packed, padded = (value_model(tiny_config(checkpoint, f"learner.packing={on}")) for on in ("true", "false"))
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    asked = [prompt(tokenizer, "p0", [image(1), image(2, 6, 4)]), prompt(tokenizer, "p1")]
    rows = [row.with_end() for row in tree(asked)]
    for row, own in zip(rows, values(packed, rows), strict=True):
        torch.testing.assert_close(own[: row.num_targets], values(padded, [row])[0], atol=1e-6, rtol=1e-6)


def test_the_gradient_of_a_value_reaches_the_backbone_and_the_vision_tower(model, checkpoint) -> None:
    values(model, sequences(checkpoint)).sum().backward()
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
