"""Wall time goes on over the parts of a resumed run, and a full cluster names the runs that hold it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mobula.cluster.runtime.placement_groups import holders
from mobula.deploy.run.run_report import earlier_wall_s


@pytest.mark.parametrize(("text", "seconds"), [('{"wall_s": 12.5}', 12.5), ("{", 0.0), ("{}", 0.0), (None, 0)])
def test_wall_time_of_earlier_parts_is_that_of_their_summary(tmp_path: Path, text: str | None, seconds: float) -> None:
    if text is not None:
        (tmp_path / "summary.json").write_text(text)
    assert earlier_wall_s(tmp_path) == seconds


def test_groups_are_counted_by_the_run_that_holds_them() -> None:
    names = ["mine/learner/0/1f", "mine/rollout/0/2e", "other/reward/0/aa", ""]
    assert holders(names) == {"mine": 2, "other": 1}
