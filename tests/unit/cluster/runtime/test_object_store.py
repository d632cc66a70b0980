"""References are resolved with a deadline, and what cannot be had is named."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, OutOfMemoryError, RayActorError

from mobula.cluster.errors import DeadlineError, LostObjectError
from mobula.cluster.runtime.object_store import fetch, fetch_at_hand, fetch_or_miss

REFERENCE, LATE = (ray.ObjectRef(byte * 28) for byte in (b"\x01", b"\x02"))


@pytest.mark.parametrize(
    ("failure", "error", "message"),
    [
        (GetTimeoutError("late"), DeadlineError, r"waited 3 s for groups \(1 objects\)"),
        (ObjectLostError("01", None, ""), LostObjectError, "groups cannot be had: the node that held it is gone"),
        (OutOfMemoryError("low"), LostObjectError, "groups cannot be had: the node that held it is gone"),
        (RayActorError(), LostObjectError, "groups cannot be had: the node that held it is gone"),
    ],
)
def test_what_cannot_be_had_is_named_by_its_cause(
    failure: Exception, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(references: Any, timeout: float) -> Any:
        raise failure

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(error, match=message):
        fetch([REFERENCE], timeout_s=3, what="groups")
    with pytest.raises(LostObjectError, match=message):  # late is as good as lost
        fetch_or_miss([REFERENCE], timeout_s=3, what="groups")


def test_plain_values_are_returned_as_they_are() -> None:
    assert fetch([1, "two"], timeout_s=1, what="values") == [1, "two"]


def test_what_is_late_is_none_and_one_call_fetches_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[set[ray.ObjectRef]] = []

    def wait(references: list[ray.ObjectRef], *, num_returns: int, timeout: float) -> tuple[list, list]:
        assert (len(references), len(set(references))) == (num_returns, num_returns), "each is asked for once"
        return [r for r in references if r != LATE], [r for r in references if r == LATE]

    def get(references: list[ray.ObjectRef], timeout: float) -> list[str]:
        asked.append(set(references))
        return [f"value of {r.hex()[:2]}" for r in references]

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", get)
    wanted = [[REFERENCE, "plain"], [], [REFERENCE, LATE], [None], [REFERENCE]]
    found = fetch_at_hand(wanted, wait_s=0)
    assert found == [["value of 01", "plain"], [], None, [None], ["value of 01"]]
    assert asked == [{REFERENCE}]


@pytest.mark.parametrize("failure", [GetTimeoutError("gone again"), ObjectLostError("01", None, "")])
def test_what_turns_out_to_be_lost_is_left_to_a_fetch_of_its_own(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(references: Any, timeout: float) -> Any:
        raise failure

    monkeypatch.setattr(ray, "wait", lambda references, **rest: (references, []))
    monkeypatch.setattr(ray, "get", get)
    assert fetch_at_hand([[REFERENCE], ["plain"], []], wait_s=0) == [None, ["plain"], []]
