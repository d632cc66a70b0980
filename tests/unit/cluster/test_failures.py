"""Failures, guards and proxies: named in one line, with causes."""

from __future__ import annotations

import logging
import math
import pickle

import pytest

from mobula.cluster.errors import EngineDiedError, EngineLostError, LogprobGapError, RolloutError, StuckError, loss_kind
from mobula.cluster.failures import MAX_MESSAGE, MAX_TRACEBACK, Failure, cause_in_one_line, frames_in
from mobula.cluster.guard.guard import LogprobGuard
from mobula.cluster.roles import UpdateReport
from mobula.cluster.weight_sync.tolerance import MeasuredRounding, Rounding
from mobula.configs.errors import ConfigError
from mobula.configs.load import load_config


def raised(message: str) -> Exception:
    def inner() -> None:
        raise RuntimeError(message)

    def outer() -> None:
        inner()

    try:
        outer()
    except RuntimeError as error:
        return error
    raise AssertionError


def test_the_cause_of_an_error_of_a_worker_names_the_frames_in_the_worker() -> None:
    error = raised("no offset")
    assert cause_in_one_line(error).startswith("RuntimeError: no offset at unit/cluster/test_failures.py:")
    error.add_note('Traceback:\n  File "/x/mobula/learner/batch.py", line 7, in fetch_items\n    raise error')
    assert cause_in_one_line(error) == "RuntimeError: no offset at mobula/learner/batch.py:7 in fetch_items"


def test_it_names_the_exception_and_the_innermost_frames_first() -> None:
    failure = Failure.of(raised("no\n  offset"))
    assert failure.summary == "RuntimeError: no offset"
    assert [frame.rpartition(" in ")[2] for frame in failure.frames] == ["inner", "outer", "raised"]
    assert failure.frames[0].startswith("unit/cluster/test_failures.py:")
    assert str(failure).startswith("RuntimeError: no offset at unit/cluster/test_failures.py:")
    assert "\n" not in str(failure) and "RuntimeError: no" in failure.traceback


def test_equal_causes_have_equal_fingerprints_whatever_their_message() -> None:
    first, second = Failure.of(raised("request 1")), Failure.of(raised("request 2"))
    assert first.fingerprint == second.fingerprint
    assert first.fingerprint != Failure.of(ValueError("request 1")).fingerprint


def test_a_long_message_and_a_long_traceback_are_cut() -> None:
    failure = Failure.of(raised("x" * 100_000))
    assert len(failure.summary) <= MAX_MESSAGE + len("RuntimeError: ")
    assert len(failure.traceback) == MAX_TRACEBACK


@pytest.mark.parametrize(
    ("exit_code", "message", "is_a_pattern"),
    [
        (-9, "was ended by signal 9 (SIGKILL)", False),
        (-15, "was ended by signal 15 (SIGTERM)", False),
        (-11, "crashed with signal 11 (SIGSEGV)", True),
        (1, "ended with exit code 1 and left no exception", False),
        (None, "does not answer, and its exit code is not known", False),
    ],
)
def test_a_process_that_left_no_exception_is_named_by_how_it_ended(
    exit_code: int | None, message: str, is_a_pattern: bool
) -> None:
    failure = Failure.of_exit(exit_code, "the engine's process 7")
    assert str(failure) == f"the engine's process 7 {message}"
    assert (failure.fingerprint is not None) == is_a_pattern


def test_an_engines_death_outlives_pickle_with_its_cause_and_its_notes() -> None:
    error = EngineDiedError("the engine failed prompt 7", Failure.of(raised("no offset")))
    error.add_note("seen by rollout/0")
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, RolloutError) and copy.failure == error.failure and str(copy) == str(error)
    assert copy.__notes__ == ["seen by rollout/0"]
    assert loss_kind(copy) == "died"


def test_the_loss_of_an_engine_inside_a_worker_does_so_too() -> None:
    error = EngineLostError(Failure.of(raised("no offset")))
    error.add_note("seen by reward/0")
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, StuckError) and copy.failure == error.failure and str(copy) == str(error)
    assert (copy.__notes__, loss_kind(copy)) == (["seen by reward/0"], "died")


def test_frames_are_read_from_a_printed_traceback() -> None:
    text = Failure.of(raised("no offset")).traceback
    assert frames_in(text) == Failure.of(raised("no offset")).frames
    assert frames_in("no traceback") == ()


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
