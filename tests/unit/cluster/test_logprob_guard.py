"""A step whose log-prob gap is over the limit ends the run or warns, with the likely causes."""

from __future__ import annotations

import logging
import math

import pytest

from mobula.cluster.errors import LogprobGapError
from mobula.cluster.logprob_guard import LogprobGuard
from mobula.cluster.roles import UpdateReport
from mobula.cluster.weight_sync.tolerance import MeasuredRounding, Rounding
from mobula.configs.errors import ConfigError
from mobula.configs.load import load_config


def check(gap: float | None, *, stops: bool = True, rounding: Rounding | None = None) -> None:
    metrics = {} if gap is None else {"logprob_gap_mean": gap, "logprob_gap_max": 4 * gap}
    guard = LogprobGuard(dtype="float32", limit=1e-3, rounding=rounding or Rounding(), stops=stops)
    guard.check(UpdateReport(3, metrics))


@pytest.mark.parametrize("gap", [None, 5e-7, 1e-3])
def test_a_step_within_the_limit_or_without_a_gap_passes(gap: float | None, caplog) -> None:
    check(gap)
    assert not caplog.records


@pytest.mark.parametrize("gap", [0.01, math.nan])
def test_a_step_over_the_limit_stops_with_the_causes(gap: float) -> None:
    match = (
        rf"step 3: .* by {gap:.3g} nat in the mean, .*supervision\.max_logprob_gap\.float32=0\.001.*template.*"
        r"penalties of generation_config\.json.*policy\.dropout.*canary_interval=1.*on_logprob_gap=warn"
    )
    with pytest.raises(LogprobGapError, match=match):
        check(gap)


def test_the_limit_grows_with_the_rounding_of_the_model_and_the_message_has_both() -> None:
    rounding = MeasuredRounding()
    rounding.nat = 0.0006
    check(0.0059, rounding=rounding)
    with pytest.raises(LogprobGapError, match=r"max_logprob_gap\.float32=0\.001, widened to 0\.006 by the rounding"):
        check(0.0061, rounding=rounding)


def test_a_step_over_the_limit_warns_where_a_run_asks_for_that(caplog) -> None:
    with caplog.at_level(logging.WARNING):
        check(0.26, stops=False)
    assert "by 0.26 nat in the mean, 1.04 at most" in caplog.text


def test_the_limit_is_that_of_the_precision_and_one_number_is_the_limit_of_both() -> None:
    own = load_config(["experiment=digits"]).supervision.max_logprob_gap
    assert (own.of("float32"), own.of("bfloat16")) == (1e-3, 0.3)
    both = load_config(["experiment=digits", "supervision.max_logprob_gap=0.02"]).supervision.max_logprob_gap
    assert (both.of("float32"), both.of("bfloat16")) == (0.02, 0.02)


def test_dropout_in_rl_needs_a_guard_that_warns() -> None:
    with pytest.raises(ConfigError, match=r"policy\.dropout=true .*supervision\.on_logprob_gap=stop"):
        load_config(["experiment=digits", "policy.dropout=true"])
    load_config(["experiment=digits", "policy.dropout=true", "supervision.on_logprob_gap=warn"])
