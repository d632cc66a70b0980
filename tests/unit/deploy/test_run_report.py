"""The report of a run that is over, its last line, and the time of all of its parts."""

from __future__ import annotations

import io
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from audited import whole_run
from click.testing import Result
from metrics_data import write_run
from rich.console import Console
from run_records import go_on
from typer.testing import CliRunner

from mobula.cluster.metrics.summary import Summary
from mobula.cluster.runtime.placement_groups import holders
from mobula.configs.load import load_config
from mobula.deploy.cli import app
from mobula.deploy.host.run_folder import RECORD_FILE
from mobula.deploy.report.audit import audit
from mobula.deploy.run.run_report import earlier_wall_s, headline

KILLED = '<span class="status killed">the driver was killed</span>'

FACT = re.compile(r"<dt>([^<]+)</dt><dd>([^<]+)</dd>")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of six steps that is done."""
    write_run(tmp_path / "digits", num_steps=6)
    return tmp_path / "digits"


def report(folder: Path) -> Result:
    return CliRunner().invoke(app, ["report", str(folder)])


def page(folder: Path) -> str:
    found = report(folder)
    assert found.exit_code == 0, found.output
    assert str(folder / "report.html") in found.output
    return (folder / "report.html").read_text(encoding="utf-8")


def facts(html: str) -> dict[str, str]:
    """The numbers of the headline."""
    return dict(FACT.findall(html.partition('<dl class="facts">')[2].partition("</dl>")[0]))


def kill(folder: Path) -> None:
    """Leave the folder as a driver that is killed does."""
    (folder / "summary.json").unlink()
    go_on(folder, start_ticks_off=-1)


def test_the_report_of_a_run_that_is_done_is_written_again(run: Path) -> None:
    first = page(run)
    assert '<span class="status done">done</span>' in first
    (run / "report.html").unlink()
    assert page(run) == first


def test_a_run_is_found_by_its_name_below_runs(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run.parent.rename(run.parent.with_name("runs"))
    monkeypatch.chdir(run.parent.parent)
    assert CliRunner().invoke(app, ["report", "digits"]).output.strip() == "report: runs/digits/report.html"


def test_the_headline_of_a_killed_run_has_the_numbers_of_its_finished_steps(run: Path) -> None:
    whole = facts(page(run))
    kill(run)
    html = page(run)
    assert KILLED in html and "at least: that of the finished steps" in html
    assert len(whole) == 13
    assert {name: text for name, text in facts(html).items() if name != "wall time"} == {
        name: text for name, text in whole.items() if name != "wall time"
    }
    assert not (run / "summary.json").exists(), "no other command may take it for a run that ended"


def test_a_half_written_last_line_and_a_run_without_a_step_have_a_report(run: Path) -> None:
    kill(run)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([*lines[:4], lines[4][:40]]))
    assert facts(page(run))["steps"] == str(sum('"kind": "step"' in line for line in lines[:4]))
    (run / "metrics.jsonl").write_text("")
    html = page(run)
    assert KILLED in html and facts(html)["steps"] == "0" and "No step was finished" in html


def test_the_summary_of_an_earlier_part_is_not_that_of_a_part_that_was_killed(run: Path) -> None:
    earlier = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps({**earlier, "version": 4, "num_steps": 4, "wall_s": 3600.0}))
    go_on(run, start_ticks_off=-1)
    html = page(run)
    assert KILLED in html and facts(html)["steps"] == "6" and facts(html)["wall time"] == "1 h 00 min"
    (run / RECORD_FILE).unlink()  # as `mobula doctor --free` does
    assert KILLED in page(run), "there are more steps than the summary has"


@pytest.mark.parametrize(
    ("word", "said"), [("nowhere", "there is no run in nowhere"), (".", "give the run's FOLDER, or its NAME below")]
)
def test_a_folder_that_is_no_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, ["report", word])
    assert found.exit_code == 2 and said in found.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_still_running_is_refused(run: Path) -> None:
    go_on(run)
    found = report(run)
    assert found.exit_code == 2 and "run digits is still running, in process" in found.stderr
    assert not (run / "report.html").exists()


def test_a_driver_of_another_machine_cannot_be_looked_at_from_here(run: Path) -> None:
    go_on(run, host="another-machine")
    found = report(run)
    assert found.exit_code == 2 and "may still be running" in found.stderr and "of another-machine" in found.stderr
    assert not (run / "report.html").exists()


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        (RECORD_FILE, "{", "is no record of a run"),
        ("metrics.jsonl", "{\n{}\n", "line 1 is not JSON"),
        ("config.yaml", "seed: 1\n", "is no configuration of a run"),
        ("config.yaml", "a: [", "is no configuration of a run"),
    ],
)
def test_a_broken_file_is_named(run: Path, file: str, text: str, said: str) -> None:
    kill(run)
    (run / file).write_text(text)
    found = report(run)
    assert found.exit_code == 2 and file in found.stderr and said in found.stderr


OWN = ["experiment=own", "policy.model=m", "data.path=d"]

MINE = (
    "rewards.components=[{name: mine, function: f.py:f, weight: 1.0, options: {}, service: reward, "
    "needs_images: false, retries: 0, cache_entries: 0}]"
)


def measured(before: float | None, after: float | None, tokens: tuple[float, float] | None = None) -> Summary:
    values: dict[str, object] = {field.name: None for field in fields(Summary)}
    values |= {"counted_before": "", "counted_after": "", "not_compared": ""}
    shares = [{} if tokens is None else {"token_accuracy": share} for share in tokens or (0.0, 0.0)]
    known = {"accuracy_before": before, "accuracy_after": after, "values_before": shares[0], "values_after": shares[1]}
    return Summary(**{**values, **known})


@pytest.mark.parametrize(
    ("words", "measured", "line"),
    [
        (OWN, measured(0.15, 0.833), "held-out accuracy 15.0% before RL, 83.3% after RL"),
        (OWN, measured(None, None), "held-out accuracy not measured before RL, not measured after RL"),
        (
            [*OWN, MINE, "rewards.accuracy_component=mine"],
            measured(-0.97, 0.5),
            "held-out mean of mine -0.97 before RL, 0.5 after RL",
        ),
        (
            [*OWN, MINE, "rewards.accuracy_component=mine"],
            measured(0.2, 7.25),
            "held-out mean of mine 0.2 before RL, 7.25 after RL",
        ),
        (
            ["experiment=sft", "policy.model=m", "data.path=d"],
            measured(0.0, 0.0, (0.47, 0.78)),
            "held-out whole answers correct 0.0% before training, 0.0% after training; tokens correct 47.0% before "
            "training, 78.0% after training",
        ),
    ],
)
def test_the_headline_names_what_was_measured(words: list[str], measured: Summary, line: str) -> None:
    assert headline(load_config(words), measured) == line


@pytest.mark.parametrize(("text", "seconds"), [('{"wall_s": 12.5}', 12.5), ("{", 0.0), ("{}", 0.0), (None, 0)])
def test_wall_time_of_earlier_parts_is_that_of_their_summary(tmp_path: Path, text: str | None, seconds: float) -> None:
    if text is not None:
        (tmp_path / "summary.json").write_text(text)
    assert earlier_wall_s(tmp_path) == seconds


def test_groups_are_counted_by_the_run_that_holds_them() -> None:
    names = ["mine/learner/0/1f", "mine/rollout/0/2e", "other/reward/0/aa", ""]
    assert holders(names) == {"mine": 2, "other": 1}


def shown(folder: Path, *, is_json: bool = False, head: str = "") -> tuple[int, str]:
    text = io.StringIO()
    code = audit(None, folder, Console(file=text, width=200), head=head, is_json=is_json)
    return code, text.getvalue()


@pytest.fixture(scope="module")
def run_audit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whole_run(tmp_path_factory.mktemp("audited") / "run")


def test_a_run_without_a_fault_is_shown_with_its_figures(run_audit: Path) -> None:
    code, text = shown(run_audit)
    assert code == 0
    lines = {line[:12].strip(): line[12:].strip() for line in text.splitlines()}
    assert lines["part 2"].startswith("resumed from the checkpoint of version 2; done")
    assert lines["trained"] == "4 steps of 8 groups"
    assert lines["staleness"].endswith("mean 0.000, max 0 of 0 allowed")
    assert lines["rollout/0"] == "checksum+canary 6"
    assert lines["checkpoint"].endswith("of part 2: steps 3 to 4 after version 2")
    assert "nothing is missing, altered or out of order" in text


def test_every_figure_is_in_the_json(run_audit: Path) -> None:
    code, text = shown(run_audit, is_json=True)
    found = json.loads(text)
    assert (code, found["findings"], found["num_groups"], found["num_pushes"]) == (0, [], 8, 6)
    assert found["checkpoints"]["4"]["steps"] == [3, 4]


def test_a_finding_is_an_exit_code_of_1(run_audit: Path) -> None:
    code, text = shown(run_audit, head="0" * 64)
    assert code == 1
    assert "no record has the sha256 0000" in text


def test_a_folder_that_is_no_run_is_an_exit_code_of_2(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["audit", "--run", str(tmp_path / "none")]).exit_code == 2
    assert CliRunner().invoke(app, ["audit", "--run", str(tmp_path)]).exit_code == 2
