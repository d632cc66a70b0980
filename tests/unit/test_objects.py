"""References are resolved with a deadline, and what cannot be had is named."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError, ObjectLostError

from cluster.errors import DeadlineError, LostObjectError
from cluster.objects import fetch, fetch_or_miss

REFERENCE = ray.ObjectRef(b"\x01" * 28)


@pytest.mark.parametrize(
    ("failure", "error", "said"),
    [
        (GetTimeoutError("late"), DeadlineError, r"waited 3 s for groups \(1 objects\)"),
        (ObjectLostError("01", None, ""), LostObjectError, "groups cannot be had: the node that held it is gone"),
    ],
)
def test_what_cannot_be_had_is_named_by_its_cause(
    failure: Exception, error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(references: Any, timeout: float) -> Any:
        raise failure

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(error, match=said):
        fetch([REFERENCE], timeout_s=3, what="groups")
    with pytest.raises(LostObjectError, match=said):  # late is as good as lost
        fetch_or_miss([REFERENCE], timeout_s=3, what="groups")


def test_plain_values_are_returned_as_they_are() -> None:
    assert fetch([1, "two"], timeout_s=1, what="values") == [1, "two"]
