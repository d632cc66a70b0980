"""What tests of roles in this process share."""

from __future__ import annotations

import pytest
from handles import LocalReference


@pytest.fixture
def abandoned(monkeypatch: pytest.MonkeyPatch) -> list[LocalReference]:
    """Calls that a rollout client has given up; only Ray can break one off in another process."""
    calls: list[LocalReference] = []
    monkeypatch.setattr("actors.rollout_client.abandon", calls.append)
    return calls
