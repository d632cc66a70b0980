"""`mobula score`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console

from mobula.cluster.errors import PreflightError
from mobula.cluster.files import replacing
from mobula.cluster.user_code import is_user_code
from mobula.configs.errors import ConfigError
from mobula.configs.load import CONFIG_FILE, load_config, load_resolved, load_rewards
from mobula.configs.schema.rewards import RewardsConfig
from mobula.deploy.data.options import ScoreCommand
from mobula.deploy.run.run_client import RUNS, named_folder
from mobula.rewards.functions import READ_LENGTHS
from mobula.rewards.offline.rows import Source, open_source
from mobula.rewards.offline.scorer import ScoringOptions, score_source

PROGRESS_PER_S = 5.0
NOTHING_SCORED = 1  # exit code


def score(command: ScoreCommand, console: Console) -> int:
    """Scores a file and prints the summary; returns the exit code, which is not 0 if no record was scored."""
    if not command.source.exists() and (RUNS / command.source).is_dir():
        command = replace(command, source=named_folder(command.source))
    rewards = chosen_rewards(command)
    source = open_source(command.source, needs_images=rewards.needs_images)
    options = ScoringOptions(
        rewards=rewards,
        folder=(command.source if command.source.is_dir() else command.source.parent).absolute(),
        timeout_s=command.timeout_s,
        pass_threshold=command.pass_threshold,
        top_k=command.top_k,
        max_ids=command.max_ids,
        writes_rows=command.results is not None,
    )
    rows = _replacing(command.results) if command.results else nullcontext(None)
    with rows as file, _progress(source, console, command.is_quiet) as on_progress:
        summary = score_source(
            source,
            options,
            num_processes=command.num_processes,
            is_strict=command.is_strict,
            rows=file,
            on_progress=on_progress,
        )
    report = {
        "source": str(source.path),
        "kind": source.kind,
        **summary.report(rewards.accuracy_component, command.pass_threshold),
        "rewards": rewards.model_dump(mode="json"),
    }
    text = json.dumps(report, indent=2, allow_nan=False)
    if command.output:
        with _replacing(command.output) as file:
            file.write(text.encode("utf-8", errors="replace") + b"\n")
    if not command.is_quiet:
        console.print(text, soft_wrap=True)
    lengths = [c.name for c in rewards.components if c.function in READ_LENGTHS or is_user_code(c.function)]
    console.print(_line(report, lengths), soft_wrap=True)
    return 0 if report["num_scored"] else NOTHING_SCORED


def chosen_rewards(command: ScoreCommand) -> RewardsConfig:
    """The rewards of `--recipe`, of the words, or of the run whose folder is scored."""
    overrides = command.overrides
    if command.recipe is not None:
        if overrides:
            raise ConfigError(f"--recipe and {overrides[0]}: both choose the rewards, give one of them")
        return load_rewards(command.recipe)
    if any(override.startswith(("rewards=", "experiment=")) for override in overrides):
        return load_config(overrides, is_complete=False).rewards
    config = command.source / CONFIG_FILE
    if config.is_file():
        return load_resolved(config, overrides).rewards
    raise ConfigError("no rewards are chosen: add rewards=NAME, e.g. rewards=exact_match, or --recipe FILE")


@contextmanager
def _progress(source: Source, console: Console, is_quiet: bool) -> Iterator[Callable[[int], None]]:
    if is_quiet or not console.is_terminal:
        yield lambda size: None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, refresh_per_second=PROGRESS_PER_S, transient=True) as progress:
        task = progress.add_task(f"scoring {source.path.name}", total=source.size)
        yield lambda size: progress.advance(task, size)


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    try:
        with replacing(path) as file:
            yield file
    except OSError as error:
        if isinstance(error, TimeoutError):  # of the scoring inside
            raise
        raise PreflightError(f"{path} cannot be written ({error.strerror}): give another path") from error


def _line(report: dict[str, Any], lengths: Sequence[str]) -> str:
    accuracy, num_scored = report["accuracy"], report["num_scored"]
    line = f"{report['num_records']:,} records"
    if num_scored:
        line += (
            f": average {report['average_reward']:g}, pass rate {report['pass_rate']:g}; {accuracy['component']} takes "
            f"{accuracy['share_right']:g} for right, {accuracy['num_right_below_threshold']:,} of them do not pass"
        )
    if report["unscored"]:
        reasons = ", ".join(f"{reason} ({num:,})" for reason, num in report["unscored"].items())
        line += f"; {report['num_records'] - num_scored:,} have no score: {reasons}"
    if report["broken"]:
        first = report["broken"][0]
        line += f"; {report['num_broken']:,} rows skipped, the first is row {first['row']}: {first['fault']}"
    if lengths and report["num_lengths_in_words"]:
        line += (
            f"; {report['num_lengths_in_words']:,} have no generated_tokens: {', '.join(lengths)} would read their "
            "number of words as their length"
        )
    if not num_scored:
        line += "; nothing was scored: rows need a `response`, or `predictions` as evaluation.save_responses writes"
    return line
