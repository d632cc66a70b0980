"""A failure names the exception and where it was raised, in one line, and travels."""

from __future__ import annotations

import pickle

import pytest

from mobula.cluster.errors import EngineDiedError, EngineLostError, RolloutError, StuckError, loss_kind
from mobula.cluster.failures import MAX_MESSAGE, MAX_TRACEBACK, Failure, frames_in


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
