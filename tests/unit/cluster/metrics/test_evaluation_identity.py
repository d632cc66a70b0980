"""Numbers of different evaluations are never a pair: summary, last line, report, charts, comparison and diagnosis."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from metrics_data import FACTS, FakeClock, make_metrics, write_run

from mobula.cluster.metrics.report.run_folder import RunFolder, read_run_folder
from mobula.cluster.metrics.sinks.base import evaluation_scalars
from mobula.cluster.metrics.step_records import BeforeAfter, EvaluationRecord, from_line, to_line
from mobula.cluster.metrics.summary import Summary, summarize
from mobula.configs.load import load_config
from mobula.deploy.report.charts import accuracy_chart
from mobula.deploy.report.comparison import ComparedRuns, render_comparison, table
from mobula.deploy.report.report import write_report
from mobula.deploy.run.run_report import headline

GREEDY = {"split": "test", "num_prompts": 24, "num_samples": 1, "temperature": 0.0, "rows": "sha256:aa"}
WARM = {**GREEDY, "temperature": 1.0}
OWN = ["experiment=own", "policy.model=m", "data.path=d"]


def record(version: int, accuracy: float, identity: Mapping[str, Any], **fields: Any) -> EvaluationRecord:
    return EvaluationRecord(version, accuracy, accuracy - 0.1, accuracy + 0.1, 24, identity=identity, **fields)


CHANGED = [record(0, 0.917, GREEDY), record(4, 0.9, GREEDY), record(8, 0.448, WARM)]
SAME = [record(0, 0.3, GREEDY), record(8, 0.6, GREEDY)]


def summary_of(records: list[EvaluationRecord]) -> Summary:
    metrics = make_metrics([], FakeClock())
    for each in records:
        metrics.record_evaluation(each)
    return summarize(metrics, FACTS, status="done", version=8, wall_s=1.0)


def test_a_changed_evaluation_gives_no_pair_and_says_what_differs() -> None:
    pair = BeforeAfter.of(CHANGED)
    assert (pair.before, pair.after) == (None, CHANGED[-1])
    assert pair.reason == "version 0 was evaluated in another way: temperature 0.0 -> 1.0"
    assert BeforeAfter.of(SAME) == BeforeAfter(SAME[0], SAME[1])
    back = [*CHANGED, record(12, 0.95, GREEDY)]
    assert BeforeAfter.of(back) == BeforeAfter(back[0], back[-1]), "the newest is that of the start again"


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        ({**GREEDY, "split": "validation", "rows": "sha256:bb"}, "split test -> validation"),
        ({**GREEDY, "rows": "sha256:bb"}, "other rows"),
        ({**GREEDY, "stop_strings": "'.'"}, "stop_strings None -> '.'"),
        ({}, "an earlier version of Mobula recorded no identity of the evaluation"),
    ],
)
def test_the_reason_names_the_keys_and_only_then_digests(new: Mapping[str, Any], reason: str) -> None:
    assert BeforeAfter.of([record(0, 0.5, GREEDY), record(4, 0.5, new)]).reason.endswith(f": {reason}")


def test_the_last_line_and_the_summary_have_no_before_of_another_evaluation() -> None:
    summary = summary_of(CHANGED)
    assert (summary.accuracy_before, summary.accuracy_after) == (None, 0.448)
    assert summary.not_compared.endswith("temperature 0.0 -> 1.0")
    assert headline(load_config(OWN), summary) == (
        "held-out accuracy 44.8% after RL; not compared with the start, since version 0 was evaluated in another way: "
        "temperature 0.0 -> 1.0"
    )
    assert headline(load_config(OWN), summary_of(SAME)) == "held-out accuracy 30.0% before RL, 60.0% after RL"


def test_means_that_leave_responses_out_say_how_many() -> None:
    missing = [replace(SAME[0], num=3, num_unscored=1), replace(SAME[1], num=24)]
    assert headline(load_config(OWN), summary_of(missing)) == (
        "held-out accuracy 30.0% before RL (3 of 4 prompts), 60.0% after RL"
    )
    assert missing[0].counted == "3 of 4 prompts"
    assert replace(missing[0], identity={**GREEDY, "num_samples": 4}).counted == "3 of 4 responses"
    assert evaluation_scalars(missing[0])["evaluation/num_unscored"] == 1
    assert from_line(to_line(missing[0])) == missing[0]


def test_a_line_of_an_earlier_version_has_no_identity() -> None:
    row = json.loads(to_line(SAME[0]))
    del row["identity"], row["num_unscored"]
    assert from_line(json.dumps(row)) == replace(SAME[0], identity={}, num_unscored=0)


def run_with(folder: Path, records: list[EvaluationRecord]) -> RunFolder:
    write_run(folder, num_steps=8)
    return replace(read_run_folder(folder), evaluations=records, suites={})


def test_the_report_shows_the_newest_number_alone_and_one_curve_for_each_evaluation(tmp_path: Path) -> None:
    run = run_with(tmp_path, CHANGED)
    held_out = [series for series in accuracy_chart(run.steps, CHANGED).series if series.label.startswith("held out")]
    assert [(s.label, len(s.points)) for s in held_out] == [("held out", 2), ("held out (temperature 0.0 -> 1.0)", 1)]
    lines = [
        line for line in (tmp_path / "metrics.jsonl").read_text().splitlines() if json.loads(line)["kind"] == "step"
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, *map(to_line, CHANGED)]) + "\n")
    text = write_report(tmp_path).read_text(encoding="utf-8")
    hero = text[text.index("Held-out accuracy") : text.index('class="facts"')]
    assert "0.448" in hero and "0.917" not in hero and "→" not in hero and "temperature 0.0 -&gt; 1.0" in hero


def test_runs_that_were_evaluated_in_different_ways_are_in_different_rows(tmp_path: Path) -> None:
    runs = {name: run_with(tmp_path / name, records) for name, records in (("a", SAME), ("b", CHANGED))}
    lines = [ComparedRuns(name, [run]) for name, run in runs.items()]
    rows = {(row.suite, row.label): row for row in table(lines)}
    assert set(rows) == {("held_out", "a"), ("held_out", "b"), ("held_out (temperature 0.0 -> 1.0)", "b")}
    changed = rows["held_out (temperature 0.0 -> 1.0)", "b"]
    assert changed.before is None and changed.after is not None and changed.after.value == 0.448
    same = rows["held_out", "b"]
    assert same.before is not None and same.after is not None and (same.before.value, same.after.value) == (0.917, 0.9)
    page = render_comparison(lines, by_epoch=False)
    assert "Accuracy on held out (temperature 0.0 -&gt; 1.0)" in page
    both = {row.suite: row for row in table([ComparedRuns("both", list(runs.values()))])}
    assert both["held_out"].num_runs == 2 and both["held_out (temperature 0.0 -> 1.0)"].num_runs == 1
