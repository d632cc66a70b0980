"""Any changed byte of a push gives another digest, whatever its dtype, size and place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mobula.cluster.weight_sync.digests import GOLDEN, NUM_COLUMNS, WORD_BYTES, digest

ROW_BYTES = NUM_COLUMNS * WORD_BYTES
DTYPES = [torch.float32, torch.bfloat16]


def digest_of(tensor: torch.Tensor) -> int:
    return int(digest(tensor.contiguous().view(-1).view(torch.uint8)))


def in_whole_numbers(data: bytes) -> int:
    """The definition, without torch: sums of words by column, weighted, modulo 2**64."""
    weights = [(n * GOLDEN | 1) for n in range(1, NUM_COLUMNS + 2)]
    end = len(data) - len(data) % WORD_BYTES
    words = [int.from_bytes(data[i : i + WORD_BYTES], "little") for i in range(0, end, WORD_BYTES)]
    total = sum(word * weights[n % NUM_COLUMNS] for n, word in enumerate(words))
    return (total + int.from_bytes(data[end:], "little") * weights[-1]) % 2**64


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 40 * ROW_BYTES), st.integers(0, 2**32 - 1))
def test_it_is_the_weighted_sum_of_words(num_bytes: int, seed: int) -> None:
    data = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
    assert int(digest(torch.from_numpy(data))) % 2**64 == in_whole_numbers(data.tobytes())


@settings(deadline=None)
@given(st.integers(1, 40 * ROW_BYTES), st.data())
def test_one_changed_byte_changes_it(num_bytes: int, data: st.DataObject) -> None:
    place, change = data.draw(st.integers(0, num_bytes - 1)), data.draw(st.integers(1, 255))
    sent = torch.zeros(num_bytes, dtype=torch.uint8)
    arrived = sent.clone()
    arrived[place] = change
    assert digest(sent) != digest(arrived)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_smallest_change_of_one_row_of_a_matrix_changes_it(dtype: torch.dtype) -> None:
    sent = torch.randn(576, 1536, generator=torch.Generator().manual_seed(0)).to(dtype)
    arrived = sent.clone()
    arrived[300].view(torch.int32 if dtype is torch.float32 else torch.int16).add_(1)  # the next number of the dtype
    assert digest_of(sent) != digest_of(arrived)
    assert digest_of(sent) == digest_of(sent.clone())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_in_each_others_place_change_it(dtype: torch.dtype) -> None:
    sent = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    arrived = sent[[1, 0, *range(2, 64)]]
    assert digest_of(sent) != digest_of(arrived)


def test_memory_that_begins_within_a_word_has_the_digest_of_its_copy() -> None:
    data = torch.arange(200, dtype=torch.uint8)
    assert digest(data[3:]) == digest(data[3:].clone())
