"""The short form of the soak (`soak.py`): random faults, and nothing is lost, trained twice or left in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak import soak
from test_faults import GONE_S, left
from waiting import wait_until

SECONDS = 25.0  # beside some 10 to start


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(400)
async def test_random_faults_lose_nothing_and_leave_nothing_behind(tmp_path: Path, local_ray: str) -> None:
    outcome = await soak(tmp_path, SECONDS, seed=0)
    assert outcome.violations == [], "\n".join(outcome.lines())
    assert outcome.faults and outcome.ledger.num_steps > 10, "\n".join(outcome.lines())
    wait_until(lambda: not left(tmp_path), GONE_S, lambda: left(tmp_path))
