"""Rounding of bfloat16 is accepted, a stale tensor is not; in float32 no token may be off."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.weight_sync.tolerance import Tolerance
from configs.load import load_config

SYNC = load_config(["experiment=digits"]).weight_sync


def tolerance(dtype: str) -> Tolerance:
    return Tolerance(SYNC.canary_tolerance.of(dtype), SYNC.canary_share.of(dtype))


def rounding(mean: float, largest: float) -> np.ndarray:
    """200 differences of an exponential distribution with this mean, and one of `largest`."""
    return np.append(np.random.default_rng(0).exponential(mean, 200), largest)


def test_two_kernels_of_a_trained_model_in_bfloat16_are_accepted() -> None:
    """Measured: 0.066 in the mean and 1.24 at most (SmolLM2-135M), 0.099 and 0.65 (Gemma 3 270M)."""
    assert tolerance("bfloat16").accepts(rounding(0.066, 1.24))
    assert tolerance("bfloat16").accepts(rounding(0.099, 0.65))
    assert not tolerance("float32").accepts(rounding(0.066, 1.24))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stale", [0.48, np.nan, np.inf])
def test_a_stale_tensor_is_found(dtype: str, stale: float) -> None:
    """A tied LM head that kept its old weight was 0.48 nat off in the mean."""
    assert not tolerance(dtype).accepts(np.full(50, stale))


def test_in_float32_one_token_beyond_is_enough_and_rounding_is_accepted() -> None:
    assert tolerance("float32").accepts(np.full(50, 1e-5))
    assert not tolerance("float32").accepts(np.append(np.full(500, 1e-7), 2e-4))


def test_many_tokens_slightly_beyond_are_found_in_bfloat16() -> None:
    differences = np.append(np.full(50, 0.31), np.full(50, 0.1))
    assert differences.mean() < 0.3
    assert not tolerance("bfloat16").accepts(differences)
