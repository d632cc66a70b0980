"""No command writes a control character or a style of a run's text to the terminal."""

from __future__ import annotations

import ast
import io
import json
import logging
import re
from pathlib import Path

import pytest
from metrics_data import write_run
from rich.table import Table
from rich.text import Text
from runs import rewrite_chain, whole_run
from typer.testing import CliRunner

from mobula.cluster.audit.chain import AUDIT_FILE
from mobula.cluster.roles import ReplayStats
from mobula.cluster.workers.status import InFlightSummary, Progress, RunStatus, WorkerState, WorkerStatus
from mobula.deploy.cli import job_commands
from mobula.deploy.cli.commands import app, main
from mobula.deploy.host.terminal import PlainConsole
from mobula.deploy.jobs.status_view import as_json, as_table
from mobula.deploy.run.logs import ConsoleHandler, PlainFormatter

ROOT = Path(__file__).parents[3]
# Clipboard (OSC 52), title, C1 introducer, colours, carriage return, markup, a link and a change of direction.
HOSTILE = (
    "a\x1b]52;c;aGk=\x07b\x1b]0;title\x1b\\c\x9b31md\x90e\x1b[2Jf\rg[bold red]h[/][link=http://x]i[/link]\u202ej\x7f"
)
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def assert_plain(text: str, *parts: str) -> None:
    assert CONTROL.findall(text) == []
    for part in parts:
        assert part in text


def console() -> tuple[PlainConsole, io.StringIO]:
    file = io.StringIO()
    return PlainConsole(file=file, width=400), file


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A foreign run: its chain, names, responses, errors and keys carry escape sequences."""
    folder = whole_run(tmp_path / "run")
    rows = [json.loads(line) for line in (folder / AUDIT_FILE).read_bytes().splitlines()]
    for seq, row in enumerate(rows):
        if row["kind"] == "started":
            row["body"]["run"] = HOSTILE
        receivers = {"receivers": {HOSTILE: HOSTILE}} if row["kind"] == "pushed" else {}
        row["body"] = row["body"] | {"status": HOSTILE} | receivers
        row["kind"] = row["kind"] if seq % 5 else HOSTILE
    rewrite_chain(folder, rows)
    (folder / f"added {HOSTILE.replace('/', '')}").write_text("")
    return folder


@pytest.mark.parametrize("words", [[], ["--json"], ["--head", HOSTILE]])
def test_audit(run: Path, words: list[str]) -> None:
    done = CliRunner().invoke(app, ["audit", "--run", str(run), *words])
    assert done.exit_code == 1, done.output
    assert_plain(done.output, "\\u001b]52;c;", "\\u009b31m")
    if "--json" in words:
        assert HOSTILE in json.loads(done.stdout)["receipts"]


def test_diagnose_compare_and_report(tmp_path: Path) -> None:
    folder = tmp_path / "a\x1b]0;t\x07[red]b"
    write_run(folder, num_steps=8, response=HOSTILE)
    (folder / "config.yaml").write_text(json.dumps({"name": HOSTILE}), encoding="utf-8")
    page = str(tmp_path / "page.html")
    for words in (["compare", f"{HOSTILE.replace('=', '')}={folder}", "--output", page], ["report", str(folder)],
                  ["diagnose", "--run", str(folder)], ["diagnose", "--run", str(folder), "--json"]):  # fmt: skip
        done = CliRunner().invoke(app, words)
        assert done.output or done.exception, words
        assert_plain(done.output)


@pytest.mark.parametrize(
    "words",
    [
        ["score", "{file}", "rewards=exact_match"],
        ["data", "inspect", "data=json", "data.path={folder}", "experiment=own", "--output", "{folder}/page.html"],
        ["data", "convert", "{file}", "{folder}/out.jsonl"],
        ["export", "{folder}"],
        ["replay", "{folder}"],
        ["status", "--run", "{folder}"],
        ["evaluate", "policy.model={folder}"],
        ["train", "--config", "{folder}/config.yaml"],
        ["plan", "policy.model={folder}"],
    ],
)
def test_errors_and_rows_that_quote_a_run(tmp_path: Path, words: list[str]) -> None:
    folder = tmp_path / "a\x1b]0;t\x07\x9b31mb"
    folder.mkdir()
    row = json.dumps({**dict.fromkeys(("id", "prompt", HOSTILE, "references"), HOSTILE), "predictions": [HOSTILE]})
    (folder / "rows.jsonl").write_text(f"{row}\n{HOSTILE}\n", encoding="utf-8")
    for name in ("train", "validation", "test"):
        (folder / f"{name}.jsonl").write_text(f"{row}\n", encoding="utf-8")
    (folder / "config.yaml").write_text(json.dumps({"name": HOSTILE, HOSTILE: 1}))
    done = CliRunner().invoke(app, [word.format(folder=folder, file=folder / "rows.jsonl") for word in words])
    assert done.output, done.exception
    assert_plain(done.output)


def test_status_top_and_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    shown, file = console()
    workers = (WorkerStatus(HOSTILE, WorkerState.SERVING, 1, 2, 0, HOSTILE),)
    replay = ReplayStats(1, 2, 3, 0.5, {HOSTILE: 1}, HOSTILE)
    progress, in_flight = Progress(1, HOSTILE, 1.5), InFlightSummary(1, HOSTILE, 1.0)
    status = RunStatus(HOSTILE, progress, 30, in_flight, replay, workers, 0, 1, 1000.0)
    shown.print(as_table(status, 1000.5))
    shown.print(as_json(status))
    assert_plain(file.getvalue(), "\\u001b]52;c;")
    job_commands._write(f"{HOSTILE}\nstep 1\r\x1b[32mstep 2\x1b[0m\n")
    assert_plain(capsys.readouterr().out, "step 1\nstep 2\n")


def test_log_lines_on_the_console_and_in_the_file() -> None:
    shown, file = console()
    record = logging.LogRecord("mobula", logging.INFO, "", 0, "%s", (HOSTILE,), None)
    ConsoleHandler(shown).emit(record)
    assert_plain(file.getvalue(), "[bold red]h[/]")
    assert_plain(PlainFormatter("%(message)s").format(record), "[bold red]h[/]")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_text_in_any_renderable_stays_text(is_terminal: bool) -> None:
    file = io.StringIO()
    shown = PlainConsole(file=file, width=400, force_terminal=is_terminal)
    table = Table(HOSTILE, title=HOSTILE)
    table.add_row(HOSTILE, style="red")
    for renderable in (HOSTILE, Text(HOSTILE, style="red"), table):
        shown.print(renderable, highlight=False)
    text = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue())  # the styles of the program itself
    assert_plain(text, "[bold red]h[/][link=http://x]i[/link]")


def test_a_bug_that_quotes_a_run_ends_with_a_plain_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing() -> None:
        raise KeyError(f"{HOSTILE}")

    monkeypatch.setattr("mobula.deploy.cli.commands.app", failing)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert_plain(capsys.readouterr().err, "Traceback", "KeyError")


def test_every_command_prints_through_this_console() -> None:
    """Other writers to the standard streams are named here, with the reason."""
    writers = {
        "cluster/runtime/ray_actors.py": "a worker's path of its log",
        "deploy/run/apart.py": "escaped",
        "deploy/cli/commands.py": "an escaped traceback",
        "deploy/cli/job_commands.py": "escaped lines of a job",
        "deploy/host/machine.py": "JSON to the parent process",
        "deploy/host/terminal.py": "the console itself",
        "deploy/checks/gpu_check/check.py": "lines of the program",
    }
    names = ("Console", "print", "sys.stdout.write", "sys.stderr.write", "typer.echo", "click.echo")

    def is_writer(node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and ast.unparse(node.func) in names

    found = {
        str(path.relative_to(ROOT))
        for room in ("actors", "cluster", "configs", "deploy", "learner", "rewards")
        for path in (ROOT / room).rglob("*.py")
        if any(map(is_writer, ast.walk(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert found - {name for name in found if name.startswith("deploy/conformance/")} <= writers.keys()
