"""The chart of reward and judge in the report."""

from __future__ import annotations

from mobula.cluster.metrics.guard_events import GuardEvent
from mobula.cluster.metrics.step_records import StepRecord
from mobula.deploy.report.charts import guard_charts


def record(step: int, **values: float) -> StepRecord:
    return StepRecord(step, {}, {"reward_mean": 1.0, **values}, {}, {}, {})


EVENT = GuardEvent(12, "judge", "rollback", 1.4, 5, "the judge fell", 1.0, 4)


def test_one_chart_has_reward_and_judge_with_errors_and_marks_each_action() -> None:
    values = {"guard_reward": 0.5, "guard_reward_se": 0.1, "guard_judge": 0.8, "guard_judge_se": 0.02}
    [chart] = guard_charts([record(1, **values), record(2)], [EVENT])
    data = chart.data
    assert data["marks"] == [(12.0, "rollback (judge)")]
    reward, judge = data["curves"]
    assert (reward["values"], reward["low"], reward["high"]) == ([0.5], [0.4], [0.6])
    assert (judge["label"], judge["steps"], judge["low"]) == ("judge (not trained)", [1], [0.78])
    assert "Step 12, rollback: the judge fell." in chart.help
    assert "rollback (judge) at step 12" in chart.label


def test_without_a_judge_the_trained_reward_carries_the_marks_of_drift() -> None:
    [chart] = guard_charts([record(1), record(2)], [EVENT])
    assert [curve["label"] for curve in chart.data["curves"]] == ["trained reward"]
    assert guard_charts([record(1), record(2)], []) == []
