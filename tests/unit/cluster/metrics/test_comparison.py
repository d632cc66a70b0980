"""Several runs on one page: table, intervals, curves over steps and epochs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
from metrics_data import write_run

from mobula.cluster.metrics.report.comparison import MAX_LINES, ComparedRuns, render_comparison, table
from mobula.cluster.metrics.report.run_folder import RunFolder, read_run_folder
from mobula.cluster.metrics.step_records import EvaluationRecord

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


def test_a_folder_is_read(tmp_path: Path) -> None:
    write_run(tmp_path / "a", num_steps=3)
    assert table([ComparedRuns("a", [read_run_folder(tmp_path / "a")])])[0].num_runs == 1
