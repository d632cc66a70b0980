"""The report, the comparison of runs, and evaluations in both."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from metrics_data import FACTS, FakeClock, flat_image, make_metrics, write_run

from mobula.cluster.metrics.report.run_folder import (
    Evidence,
    RunFinding,
    RunFolder,
    RunVerdict,
    read_run_folder,
    write_findings,
)
from mobula.cluster.metrics.report.samples import HeldOutAnswer, read_samples, write_answers, write_rows
from mobula.cluster.metrics.sinks.base import evaluation_scalars
from mobula.cluster.metrics.step_records import (
    BeforeAfter,
    ControlGain,
    EvaluationRecord,
    StepRecord,
    from_line,
    to_line,
)
from mobula.cluster.metrics.summary import (
    Summary,
    bootstrap_interval,
    interval_of_mean,
    ks,
    pass_at_k,
    reflection_ratios,
    summarize,
    wilson_interval,
)
from mobula.configs.load import load_config
from mobula.deploy.pages.report import (
    MAX_POINTS,
    Chart,
    accuracy_chart,
    curve,
    write_bytes,
    write_duration,
    write_number,
    write_report,
)
from mobula.deploy.report.comparison import MAX_LINES, ComparedRuns, pairs, render_comparison, table
from mobula.deploy.run.run_report import headline

VOID = {"meta", "link", "img", "br", "path", "input", "hr"}

HOSTILE = '<script>alert("owned")</script><img src=x onerror=alert(1)> </pre></article> & \'"'


class Page(HTMLParser):
    """The page's elements; an element that is closed out of order fails the test."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def with_class(self, name: str) -> list[dict[str, str | None]]:
        return [attrs for _, attrs in self.elements if name in (attrs.get("class") or "").split()]

    def ids(self) -> set[str | None]:
        return {attrs["id"] for _, attrs in self.elements if "id" in attrs}


def chart_data(text: str) -> dict[str, dict[str, Any]]:
    """Key of each chart -> the data that the page's script draws."""
    pairs = re.findall(r'id="chart-(\w+)".*?<script type="application/json">(.*?)</script>', text, flags=re.DOTALL)
    return {key: json.loads(data, parse_constant=pytest.fail) for key, data in pairs}


def report(folder: Path) -> str:
    return write_report(folder).read_text(encoding="utf-8")


def test_a_full_run_shows_every_curve_table_and_sample(tmp_path: Path) -> None:
    write_run(tmp_path / "digits", num_steps=40)
    text = report(tmp_path / "digits")
    page = Page(text)
    keys = "accuracy reward kl entropy response_length staleness logprob_gap seconds tokens_per_s".split()
    assert {f"chart-{key}" for key in keys} <= page.ids()
    assert len(page.with_class("sample")) == 24
    assert {attrs["data-kind"] for attrs in page.with_class("sample")} == {"best", "worst", "random"}
    images = [attrs["src"] or "" for tag, attrs in page.elements if tag == "img"]
    assert len(images) >= 24 and all(src.startswith("data:image/png;base64,") for src in images)
    for needle in ("rollout/1", "learner/0", "train-00911", "bad_prompt", "uniform_rewards", "max_staleness: 1"):
        assert needle in text
    assert "<b>0.520</b>" in text


def test_the_report_refers_to_nothing_outside_itself(tmp_path: Path) -> None:
    write_run(tmp_path / "digits", num_steps=3)
    text = report(tmp_path / "digits")
    text = re.sub(r"/\*!.*?\*/", "", text, flags=re.DOTALL)  # the licence of uPlot
    addresses = [value for _, attrs in Page(text).elements for name, value in attrs.items() if name in ("src", "href")]
    assert all((value or "").startswith("data:") for value in addresses)
    assert not re.search(r"https?://|@import|url\(", text)


def test_episodes_show_rewards_of_turns_and_the_stage_of_a_curriculum(tmp_path: Path) -> None:
    write_run(tmp_path, num_steps=4)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if "step" in line and "values" in line:
            line["values"] |= {"turn_reward_1": 0.25, "turn_reward_2": 0.5, "curriculum_stage": float(line["step"] > 2)}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "Reward of turns" in page and "turn 2" in page
    assert "curriculum stage" in page and "open since step 3" in page


def test_what_a_model_writes_stays_text(tmp_path: Path) -> None:
    write_run(tmp_path / "digits", num_steps=3, response=HOSTILE)
    (tmp_path / "digits" / "config.yaml").write_text(f"name: '{HOSTILE}'")
    skipped = dict.fromkeys(("sample_id", "reason", "message"), HOSTILE)
    (tmp_path / "digits" / "skipped.json").write_text(json.dumps([skipped]))
    text = report(tmp_path / "digits")
    page = Page(text)
    assert "&lt;script&gt;alert(" in text and '<script>alert("' not in text
    assert [attrs for tag, attrs in page.elements if "onerror" in attrs or attrs.get("src") == "x"] == []
    assert len([1 for tag, attrs in page.elements if tag == "script" and "type" not in attrs]) == 1


def test_a_run_that_failed_before_its_first_step_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "early").mkdir()
    text = report(tmp_path / "early")
    Page(text)
    assert "unfinished" in text and "No step was finished" in text and "No sample was kept" in text


def test_numbers_that_are_not_finite_leave_a_gap(tmp_path: Path) -> None:
    write_run(tmp_path / "odd", num_steps=6)
    path = tmp_path / "odd" / "metrics.jsonl"
    seconds = {"update": math.nan, "other": math.inf, "total": math.nan}
    values = {"reward_mean": math.nan, "kl": math.inf, "entropy": -math.inf, "grad_norm": 1e308}
    bad = StepRecord(7, seconds, values, {}, {"answer": math.nan}, {})
    path.write_text(path.read_text() + to_line(bad) + "\n")
    text = report(tmp_path / "odd")
    Page(text)
    reward = chart_data(text)["reward"]["curves"][-1]
    assert reward["steps"] == [1, 2, 3, 4, 5, 6, 7] and reward["values"][-1] is None


def test_five_thousand_steps_stay_small_and_thin(tmp_path: Path) -> None:
    folder = tmp_path / "long"
    write_run(folder, num_steps=4)
    path = folder / "metrics.jsonl"
    line = next(line for line in path.read_text().splitlines() if '"step": 4' in line)
    row = json.loads(line)
    path.write_text("".join(json.dumps({**row, "step": step}) + "\n" for step in range(1, 5001)))
    text = report(folder)
    assert len(text) < 3_000_000
    lengths = [len(curve["values"]) for chart in chart_data(text).values() for curve in chart["curves"]]
    assert max(lengths) == MAX_POINTS


def test_a_log_axis_leaves_zero_and_infinity_out() -> None:
    values = [(1, 1e-6), (2, 0.0), (3, math.inf)]
    charts = [Chart("k", "K", "", [curve("k", 1, values)], is_log=is_log) for is_log in (True, False)]
    assert [chart.data["curves"][0]["values"] for chart in charts] == [[1e-6, None, None], [1e-6, 0.0, None]]


@pytest.mark.parametrize("keeps_peaks", [True, False])
def test_thinning_keeps_the_peak_where_it_is_asked_to_and_always_the_range(keeps_peaks: bool) -> None:
    values = [(step, 1.0) for step in range(1, 2001)]
    values[777] = (778, 50.0)
    [data] = Chart("k", "K", "", [curve("k", 1, values, keeps_peaks=keeps_peaks)]).data["curves"]
    assert max(data["values"]) == (50.0 if keeps_peaks else 13.25)
    assert (min(data["low"]), max(data["high"])) == (1.0, 50.0)


def test_numbers_sizes_and_times_read_well() -> None:
    numbers = {0: "0", 0.03125: "0.0312", 0.5: "0.5", 12.34: "12.3", 1234.5: "1,234", 2.3e-7: "2.3e-7", 1e9: "1e9"}
    assert {value: write_number(value) for value in numbers} == numbers
    assert [write_bytes(512), write_bytes(3 * 2**20)] == ["512 B", "3 MiB"]
    assert [write_duration(4.25), write_duration(185), write_duration(7800)] == ["4.25 s", "3 min 05 s", "2 h 10 min"]


def test_warnings_and_the_share_of_right_tokens_stand_at_the_top(tmp_path: Path) -> None:
    write_run(tmp_path / "idle", num_steps=4)
    summary = json.loads((tmp_path / "idle" / "summary.json").read_text())
    summary["warnings"] = ["nothing was learned in the last 4 of 4 steps: every <b> has the reward 0"]
    (tmp_path / "idle" / "summary.json").write_text(json.dumps(summary))
    metrics = tmp_path / "idle" / "metrics.jsonl"
    kept = [line for line in metrics.read_text().splitlines() if '"kind": "evaluation"' not in line]
    shares = ((0, 0.47), (4, 0.78))
    records = [EvaluationRecord(version, 0.0, 0.0, 0.1, 32, values={"token_accuracy": t}) for version, t in shares]
    metrics.write_text("\n".join([*kept, *map(to_line, records)]) + "\n")
    text = report(tmp_path / "idle")
    assert "every &lt;b&gt; has the reward 0" in text
    assert "of whole answers; tokens correct: 47.0 % → 78.0 %" in text


def test_controls_have_a_table_and_the_best_one_stands_at_the_top(tmp_path: Path) -> None:
    write_run(tmp_path / "run", num_steps=4)
    gains = (
        ControlGain("blank_image", 0.1, 0.84, 0.8, 0.88, 200, before=0.1, policy_before=0.5),
        ControlGain("direct_prompt", 0.72, 0.22, 0.15, 0.29, 200, before=0.5, policy_before=0.5),
    )
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(to_line(EvaluationRecord(4, 0.94, 0.9, 0.97, 200, controls=gains)) + "\n")
    text = report(tmp_path / "run")
    assert "Over the best control (direct prompt): <b>+0.220</b>, 95 %: +0.150 to +0.290" in text
    table = text[text.index('id="controls"') :]
    assert table.index("direct prompt") < table.index("blank image") and "50 %" in table


def test_held_out_answers_are_shown_before_and_after(tmp_path: Path) -> None:
    write_run(tmp_path / "run", num_steps=4)
    png = flat_image(7)
    for version, text, reward in ((0, "<b>3", 0.0), (2, "4", 0.0), (4, "5", 1.0)):
        answer = HeldOutAnswer("s0", "Which digit?", ("5", r"\boxed{5}"), (png,), text, reward)
        lost = HeldOutAnswer("s1", "And this?", ("6",), (), "", None)
        write_answers(tmp_path / "run" / "evaluations", version, [answer, lost])
    text = report(tmp_path / "run")
    table = text[text.index('id="answers"') : text.index("</table>", text.index('id="answers"'))]
    assert "Which digit?" in table and "&lt;b&gt;3" in table and table.count("data:image/png") == 1
    assert table.index("&lt;b&gt;3") < table.index(">5 ") and ">4 " not in table
    assert table.count("(empty)") == 2 and "boxed" not in table


def test_runs_are_paired_by_row_in_the_suites_that_both_have(tmp_path: Path) -> None:
    for name, right in (("first", 4), ("second", 9)):
        write_run(tmp_path / name, num_steps=4)
        for version, shift in ((0, 5), (4, 0)):
            values = {f"test/{n}/s{n}": float(n + shift < right) for n in range(12 - (name == "second"))}
            write_rows(tmp_path / name / "evaluations", "held_out", version, values)
    [found] = pairs([str(tmp_path / "first"), f"b={tmp_path / 'second'}"])
    assert (found.num, found.better, found.worse, found.difference) == (11, 5, 0, pytest.approx(5 / 11))
    assert "second - first = +0.455" in str(found) and "p = 0.062 (exact McNemar test)" in str(found)
    write_run(tmp_path / "older", num_steps=4)
    assert list(pairs([str(tmp_path / "first"), str(tmp_path / "older")])) == []


CONFIG = "algorithm:\n  prompts_per_step: 16\n"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunFolder]:
    folder = tmp_path_factory.mktemp("runs")
    found = []
    for seed in (1, 2, 3):
        write_run(folder / f"seed{seed}", num_steps=12, seed=seed)
        run = replace(read_run_folder(folder / f"seed{seed}"), config=CONFIG)
        high = [EvaluationRecord(v, 0.1 * seed, 0.0, 1.0, 8, "high", {"pass_at_8": 0.2 * seed}) for v in (0, 12)]
        found.append(replace(run, suites={"high": high}))
    return found


def test_a_row_has_means_over_runs_and_an_interval_that_holds_them(runs: list[RunFolder]) -> None:
    own, high = table([ComparedRuns("grpo", runs)])
    firsts = [run.evaluations[0].accuracy for run in runs]
    lasts = [run.evaluations[-1].accuracy for run in runs]
    assert (own.suite, own.num_runs, own.before.value) == ("held_out", 3, mean(firsts))
    assert own.after is not None and own.after.value == mean(lasts)
    assert min(lasts) - 1e-9 <= own.after.low < own.after.value < own.after.high <= max(lasts) + 1e-9
    assert own.best is not None and own.mean is not None and own.best.value >= own.mean.value
    assert high.values == {"pass_at_8": pytest.approx(0.4)}


def test_one_run_keeps_the_interval_over_its_prompts(runs: list[RunFolder]) -> None:
    row = table([ComparedRuns("one", runs[:1])])[0]
    first = runs[0].evaluations[0]
    assert (row.before.low, row.before.high) == (first.low, first.high)


def test_the_page_has_every_line_and_runs_no_other_script(runs: list[RunFolder]) -> None:
    page = render_comparison([ComparedRuns("a<b>", runs[:2]), ComparedRuns("rloo", runs[2:])], by_epoch=False)
    assert "a&lt;b&gt;" in page and "a<b>" not in page
    for title in ("Training accuracy", "Accuracy on high", "Reward", "Response length"):
        assert title in page
    assert page.count("<script>") == 1 and "src=" not in page.split("</style>")[1]


def test_over_epochs_the_training_accuracy_is_cumulative_within_each(runs: list[RunFolder]) -> None:
    """64 training prompts, 16 a step: an epoch is four steps."""
    page = render_comparison([ComparedRuns("grpo", runs[:1])], by_epoch=True)
    assert '"axis": "epoch"' in page
    with pytest.raises(ValueError, match="compare it over steps, not epochs"):
        render_comparison([ComparedRuns("x", [replace(runs[0], config="")])], by_epoch=True)


@pytest.mark.parametrize("num", [0, MAX_LINES + 1])
def test_too_many_lines_are_refused(runs: list[RunFolder], num: int) -> None:
    with pytest.raises(ValueError, match=f"{num} lines cannot be compared: give 1 to {MAX_LINES}"):
        render_comparison([ComparedRuns(str(n), runs[:1]) for n in range(num)], by_epoch=False)


def test_the_diagnosis_is_a_section_with_its_evidence_and_pictures(tmp_path: Path) -> None:
    write_run(tmp_path, num_steps=4)
    assert 'id="diagnosis"' not in write_report(tmp_path).read_text(encoding="utf-8")
    key = next(iter(read_samples(tmp_path / "samples.jsonl").thumbnails))
    evidence = (Evidence("cut after <b>", (key, "absent")),)
    fault = RunFinding("truncation", RunVerdict.FAULT, "90 % were cut", {"share": 0.9}, "raise it", evidence)
    skipped = RunFinding("variety", RunVerdict.NOT_MEASURED, "too few groups")
    write_findings(tmp_path, [fault, skipped])
    page = write_report(tmp_path).read_text(encoding="utf-8")
    section = page[page.index('id="diagnosis"') :].partition("</section>")[0]
    assert "90 % were cut" in section and "<b>raise it</b>" in section and "cut after &lt;b&gt;" in section
    assert section.count("data:image/png") == 1 and "too few groups" not in section


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


BY_MINE = [*OWN, "rewards.components=[{name: mine, function: f.py:f, weight: 1.0}]", "rewards.accuracy_component=mine"]
TAUGHT = [record(v, 0.0, GREEDY, values={"token_accuracy": share}) for v, share in ((0, 0.47), (8, 0.78))]


@pytest.mark.parametrize(
    ("words", "records", "line"),
    [
        (OWN, [], "held-out accuracy not measured before RL, not measured after RL"),
        (BY_MINE, [(0, -0.97), (8, 0.5)], "held-out mine -0.97 before RL, 0.5 after RL"),
        (BY_MINE, [(0, 0.2), (8, 7.25)], "held-out mine 0.2 before RL, 7.25 after RL"),
    ],
)
def test_the_headline_names_what_was_measured(words: list[str], records: list[tuple[int, float]], line: str) -> None:
    measure = load_config(words).rewards.own_measure or "accuracy"
    found = [replace(record(*one, GREEDY), measure=measure) for one in records]
    assert headline(load_config(words), summary_of(found)) == line


def test_the_headline_of_supervised_training_has_the_share_of_right_tokens() -> None:
    assert headline(load_config(["experiment=sft", *OWN[1:]]), summary_of(TAUGHT)) == (
        "held-out whole answers correct 0.0% before training, 0.0% after training; tokens correct 47.0% before "
        "training, 78.0% after training"
    )


def test_means_that_leave_responses_out_say_how_many() -> None:
    missing = [replace(SAME[0], num=3, num_unscored=1), replace(SAME[1], num=24)]
    line = "held-out accuracy 30.0% before RL (3 of 4 prompts), 60.0% after RL"
    assert headline(load_config(OWN), summary_of(missing)) == line
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
    path = tmp_path / "metrics.jsonl"
    lines = [line for line in path.read_text().splitlines() if json.loads(line)["kind"] == "step"]
    path.write_text("\n".join([*lines, *map(to_line, CHANGED)]) + "\n")
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


def test_the_interval_is_the_one_of_the_literature() -> None:
    low, high = wilson_interval(0.1, 20)  # 2 of 20: Newcombe 1998's formula 3, computed by hand
    assert (round(low, 4), round(high, 4)) == (0.0279, 0.3010)
    low, high = wilson_interval(81 / 263, 263)  # his table I
    assert (round(low, 4), round(high, 4)) == (0.2553, 0.3662)


@given(num=st.integers(1, 10_000), share=st.floats(0, 1))
def test_the_interval_holds_the_mean_and_stays_within_0_and_1(num: int, share: float) -> None:
    low, high = wilson_interval(share, num)
    assert 0 <= low <= share + 1e-12
    assert share - 1e-12 <= high <= 1
    assert high > low


def test_the_interval_of_a_mean_is_that_of_a_share_within_0_and_1_and_a_bootstrap_elsewhere() -> None:
    assert interval_of_mean([1.0, 0.0, 0.5, 0.5], 0) == wilson_interval(0.5, 4)
    signed = [1.0] * 50 + [-1.0] * 50
    low, high = interval_of_mean(signed, 0)
    half = 1.96 / math.sqrt(100)  # the normal approximation: the standard deviation of a sign is 1
    assert low == pytest.approx(-half, abs=0.04) and high == pytest.approx(half, abs=0.04)
    assert interval_of_mean([-1.0] * 8, 0) == (-1.0, -1.0)
    assert interval_of_mean([10.0, 2.5], 3) == bootstrap_interval([10.0, 2.5], 3)


@given(data=st.data(), num=st.integers(1, 8))
def test_pass_at_k_is_the_share_of_all_choices_of_k_with_a_correct_one(data: st.DataObject, num: int) -> None:
    correct, k = data.draw(st.integers(0, num)), data.draw(st.integers(1, num))
    choices = list(itertools.combinations(range(num), k))
    expected = sum(any(i < correct for i in choice) for choice in choices) / len(choices)
    assert math.isclose(pass_at_k(num, correct, k), expected, abs_tol=1e-12)


@pytest.mark.parametrize(("num", "correct", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_outside_its_definition_is_refused(num: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match="is not defined"):
        pass_at_k(num, correct, k)


def test_pass_at_k_is_reported_for_powers_of_two_and_for_all_samples() -> None:
    assert [ks(num) for num in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_the_bootstrap_interval_is_near_the_normal_one_and_repeats() -> None:
    values = np.random.default_rng(0).normal(0.5, 0.2, size=400)
    low, high = bootstrap_interval(list(values), seed=3)
    half = 1.96 * values.std() / math.sqrt(values.size)
    assert math.isclose(high - low, 2 * half, rel_tol=0.1)
    assert math.isclose((high + low) / 2, values.mean(), abs_tol=half / 4)
    assert (low, high) == bootstrap_interval(list(values), seed=3)
    assert bootstrap_interval([0.25], seed=0) == (0.25, 0.25)


def test_reflection_ratios_of_a_table_counted_by_hand() -> None:
    """Ten responses: four reflect, three of these are correct; of the six others two are."""
    reflects = [True] * 4 + [False] * 6
    correct = [True, True, True, False] + [True, True] + [False] * 4
    assert reflection_ratios(correct, reflects) == {
        "reflection_ratio": 0.4, "reflection_ratio_in_correct": 0.6, "reflection_ratio_in_incorrect": 0.2,
        "correct_ratio": 0.5, "correct_ratio_in_reflection": 0.75, "correct_ratio_in_no_reflection": 1 / 3,
    }  # fmt: skip
    none = reflection_ratios([True], [False])
    assert none["reflection_ratio_in_incorrect"] == none["correct_ratio_in_reflection"] == 0.0
