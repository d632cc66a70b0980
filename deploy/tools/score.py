"""`mobula score` and `mobula corrupt`: recorded responses scored without a run, and flawed ones to score."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from mobula.cluster.errors import PreflightError
from mobula.rewards.offline.evaluation import BrokenSourceError, evaluate
from mobula.rewards.offline.options import ScoreOptions
from mobula.rewards.offline.report import build_report
from mobula.rewards.offline.rules.schemes import Scheme, built_in_schemes
from mobula.rewards.offline.scoring import SchemeScorer
from mobula.rewards.offline.sources.source import Source, open_source

PROGRESS_PER_S = 5.0
AERORL, MOBULA, RECIPE = range(3)  # places among the schemes


@dataclass(frozen=True)
class ScoreCommand:
    """Options of `mobula score`; files whose path is None are not written."""

    source: Path
    options: ScoreOptions
    is_compatible: bool  # aeroRL's reading on top of the report in place of ours
    recipe: Path | None
    output: Path | None
    html: Path | None
    results: Path | None
    num_processes: int
    timeout_s: float
    is_strict: bool
    is_quiet: bool


def score(command: ScoreCommand, console: Console) -> int:
    """Score a file, write what was asked for and say the summary; returns the exit code.

    Raises:
        PreflightError: the source or the recipe is unfit, a line is no record under --strict, or a file cannot be
            written.
        WorkerDiedError, DeadlineError: a process died or hung.
    """
    source = open_source(command.source)
    scorer = _scorer(command)
    primary = scorer.schemes[-1 if command.recipe else AERORL if command.is_compatible else MOBULA].name
    rows = _replacing(command.results) if command.results else nullcontext(None)
    try:
        with rows as file, _progress(source, console, command.is_quiet) as on_progress:
            whole = evaluate(
                source,
                scorer,
                command.options,
                num_processes=command.num_processes,
                timeout_s=command.timeout_s,
                is_strict=command.is_strict,
                rows=file,
                on_progress=on_progress,
            )
    except BrokenSourceError as error:
        raise PreflightError(str(error)) from error
    report = build_report(whole, scorer, command.options, source, primary=primary)
    text = json.dumps(report, indent=2, allow_nan=False)
    if command.output:
        _write(command.output, text + "\n")
    if command.html:
        from mobula.rewards.offline.page import render_page  # Jinja, which nothing else here needs

        _write(command.html, render_page(report))
    _say(console, report, text, command)
    return 0


def corrupt(source: Path, target: Path, console: Console) -> int:
    """Write a record of known flaws for each prompt and reference of `source`; returns the exit code.

    Raises:
        PreflightError: a line has no reference or is no object, or a file cannot be read or written.
    """
    from mobula.rewards.offline.corruption import corrupt_lines

    try:
        with source.open("rb") as lines, _replacing(target) as file:
            counts = corrupt_lines(lines, file)
    except OSError as error:
        raise PreflightError(f"{source} cannot be read ({error.strerror}): give a JSONL file") from error
    except ValueError as error:
        raise PreflightError(f"{source}, {error}") from error
    shares = ", ".join(f"{name} {num:,}" for name, num in counts.items())
    console.print(f"{sum(counts.values()):,} records written to {target}: {shares}", markup=False, soft_wrap=True)
    return 0


def _scorer(command: ScoreCommand) -> SchemeScorer:
    schemes: tuple[Scheme, ...] = built_in_schemes(command.options)
    compared = (MOBULA, AERORL)
    if command.recipe:
        from mobula.rewards.offline.rules.recipe_scheme import recipe_scheme

        folder = command.source if command.source.is_dir() else command.source.parent
        by_recipe = recipe_scheme(command.recipe, command.options, folder=folder, timeout_s=command.timeout_s)
        schemes = (*schemes, by_recipe)
        compared = (RECIPE, MOBULA)
    return SchemeScorer(schemes, command.options, compared=compared, writes_rows=command.results is not None)


@contextmanager
def _progress(source: Source, console: Console, is_quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar that is drawn by this thread alone: the processes are forked while it stands."""
    if is_quiet or not console.is_terminal:
        yield lambda size: None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task(f"scoring {source.path.name}", total=source.size)
        drawn = 0.0

        def advance(size: int) -> None:
            nonlocal drawn
            progress.advance(task, size)
            now = progress.get_time()
            if now - drawn >= 1 / PROGRESS_PER_S:
                drawn = now
                progress.refresh()

        yield advance


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes its place when it is whole.

    Raises:
        PreflightError: it cannot be written.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with draft.open("wb") as file:
                yield file
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise PreflightError(f"{path} cannot be written ({error.strerror}): give another path") from error


def _write(path: Path, text: str) -> None:
    with _replacing(path) as file:
        file.write(text.encode("utf-8", errors="replace"))


def _say(console: Console, report: dict[str, Any], text: str, command: ScoreCommand) -> None:
    """The whole report unless it is quiet, then a line of it."""
    if not command.is_quiet:
        console.print("=== Reward Summary ===", markup=False)
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    found = report["input"]
    line = f"{found['num_records']:,} records"
    if found["num_records"]:
        gate = report["improvement"]["quality_gate_gain"]
        line += (
            f" by {report['semantics']}: average {report['average_reward']:g}, pass rate {report['pass_rate']:g}; the "
            f"manual baseline passes {report['manual_baseline']['pass_rate']:g}, {gate['false_pass_count']:,} of them "
            "falsely"
        )
        if report["unscored"]:
            reasons = ", ".join(f"{reason} ({num:,})" for reason, num in report["unscored"].items())
            line += f"; {found['num_records'] - report['num_scored']:,} have no score: {reasons}"
    if found["num_broken"]:
        first = found["broken"][0]
        line += f"; {found['num_broken']:,} lines skipped, the first is line {first['line']}: {first['reason']}"
    console.print(line, markup=False, highlight=False, soft_wrap=True)
