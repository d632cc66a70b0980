"""Fixtures of the tests of weight sync."""

import pytest


@pytest.fixture(autouse=True)
def without_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store clients of torch look up the name of each address: a request that a name server drops takes 5 s, which is
    as long as deadlines of these tests."""
    monkeypatch.setenv("RES_OPTIONS", "attempts:0")
