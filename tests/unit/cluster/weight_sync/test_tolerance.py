"""Rounding of bfloat16 is accepted, another policy is not; in float32 no token may be off."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from fakes import make_prompt

from mobula.cluster.weight_sync.tolerance import MeasuredRounding, Rounding, Tolerance, num_copies
from mobula.configs.groups import groups, leaves, own_values
from mobula.configs.load import load_config
from mobula.deploy.wiring.parity_gate import tolerance_of

PROBE = make_prompt("0/0/probe")
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


class Learner:
    """Log-probs of -1 that a batch of several rows changes by `rounding`."""

    def __init__(self, rounding: list[float]) -> None:
        self._rounding = np.array(rounding)
        self.batches: list[int] = []

    async def sequence_logprobs(self, prompt: object, num_copies: int = 1) -> np.ndarray:
        self.batches.append(num_copies)
        return np.full(len(self._rounding), -1.0) + (self._rounding if num_copies > 1 else 0.0)


async def measured(*rounding: float) -> tuple[Tolerance, Learner]:
    learner, found = Learner(list(rounding)), MeasuredRounding()
    for _ in range(2):
        await found.measure(learner, PROBE)
    return Tolerance(0.3, 0.4, found), learner


async def test_a_model_that_rounds_more_has_wider_bounds() -> None:
    """Ten times the mean difference of the learner's own two batches: 0.06 nat here."""
    tolerance, learner = await measured(0.03, -0.09)
    assert learner.batches == [1, num_copies(PROBE)], "once a run"
    assert tolerance.accepts(np.full(50, 0.59))
    assert not tolerance.accepts(np.full(50, 0.61))
    assert str(tolerance).startswith("weight_sync.canary_tolerance=0.3, widened to 0.6 by the rounding of the model")


@pytest.mark.parametrize("rounding", [(0.03, 0.02), (0.0, 0.0), (np.nan, 0.0), (np.inf, 0.0)])
async def test_bounds_are_never_below_the_configured_ones_and_finite(rounding: tuple[float, ...]) -> None:
    tolerance, _ = await measured(*rounding)
    assert tolerance.accepts(np.full(50, 0.29))
    assert not tolerance.accepts(np.full(50, 0.31))


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 1024), (40, 25), (200, 5), (600, 4), (9000, 4)])
def test_a_batch_has_so_many_copies_that_kernels_add_up_in_another_order(num_tokens: int, expected: int) -> None:
    """SmolLM2-135M on CPU: 4 copies of 40 tokens equal one bit for bit, 25 do not."""
    assert num_copies(SimpleNamespace(num_tokens=num_tokens)) == expected


def test_in_float32_nothing_is_measured() -> None:
    for dtype, kind in (("float32", Rounding), ("bfloat16", MeasuredRounding)):
        config = load_config(["experiment=digits", f"resources.dtype={dtype}"])
        assert type(tolerance_of(config).rounding) is kind


@pytest.mark.parametrize("preset", groups()["resources"])
def test_no_preset_has_bounds_of_its_own(preset: str) -> None:
    """A tighter one would end the runs of released models, whose rounding is measured above."""
    keys = [key for key, _ in leaves(own_values("resources", preset))]
    assert not [key for key in keys if key.startswith(("weight_sync.canary", "supervision.max_logprob_gap"))]
