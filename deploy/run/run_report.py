"""Report and closing lines of a run."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import yaml
from rich.console import Console

from mobula.actors.datasets.open_split import TRAIN
from mobula.actors.datasets.rows import count_by_reason
from mobula.cluster.errors import PreflightError
from mobula.cluster.metrics.definitions import CounterName, MetricName
from mobula.cluster.metrics.hub import Metrics, informing
from mobula.cluster.metrics.report.run_folder import (
    CONFIG_FILE,
    METRICS_FILE,
    REPORT_FILE,
    SUMMARY_FILE,
    RunFolder,
    read_run_folder,
)
from mobula.cluster.metrics.sinks.jsonl import read_records
from mobula.cluster.metrics.step_records import ControlGain
from mobula.cluster.metrics.summary import RunFacts, Status, Summary, read_summary, summarize, write_summary
from mobula.configs.load import load_resolved
from mobula.configs.schema import RunConfig
from mobula.configs.schema.rewards import ACCURACY
from mobula.deploy.host.run_folder import RECORD_FILE, RunRecord
from mobula.deploy.pages.report import write_report
from mobula.deploy.run.run_client import named_folder
from mobula.deploy.wiring.preparation import AnyPrepared, write_skipped

NAMES = {
    "sft": "whole answers correct",
    "dpo": "pairs in order",
    "kto": "answers on the side of their label",
    "reward_model": "pairs or labels in order",
}


def headline(config: RunConfig, summary: Summary) -> str:
    """Formats the accuracy before and after; for `sft` also the share of correct tokens. Evaluations that cannot be
    compared are not shown as a pair."""
    phase = "training" if config.offline.is_on else "RL"
    start = "after the warm start" if config.warm_start.num_steps else f"before {phase}"

    def change(name: str, before: float | None, after: float | None, write: Callable[[float | None], str]) -> str:
        then, now = (f" ({n})" if " of " in n else "" for n in (summary.counted_before, summary.counted_after))
        if summary.not_compared:
            return f"{name} {write(after)} after {phase}{now}"
        return f"{name} {write(before)} {start}{then}, {write(after)} after {phase}{now}"

    before, after = summary.accuracy_before, summary.accuracy_after
    is_share = summary.measure == ACCURACY and all(value is None or 0 <= value <= 1 for value in (before, after))
    name = NAMES.get(config.offline.job, summary.measure)
    lines = [change(f"held-out {name}", before, after, _percent if is_share else _number)]
    key = MetricName.TOKEN_ACCURACY
    shares = (summary.values_before.get(key), summary.values_after.get(key))
    if any(share is not None for share in shares):
        lines.append(change("tokens correct", *shares, _percent))
    if summary.controls:
        lines.append(over_control(summary.controls[0]))
    if summary.not_compared:
        lines.append(f"not compared with the start, since {summary.not_compared}")
    return "; ".join(lines)


def over_control(best: ControlGain) -> str:
    """Says in one sentence what the policy gains over its best control."""
    note = "" if best.low > 0 or best.high < 0 else "; the interval includes 0"
    return (
        f"{best.gain:+.3f} over the best control ({best.control} {best.accuracy:.3f}; 95 % {best.low:+.3f} to "
        f"{best.high:+.3f}, {best.num} rows{note})"
    )


def _percent(share: float | None) -> str:
    return "not measured" if share is None else f"{share:.1%}"


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3g}"


def leave_behind(prepared: AnyPrepared, metrics: Metrics, status: Status, wall_s: float, error: str) -> Summary:
    """Writes summary and report after success or failure. An error here does not hide the error that ended the run."""
    config = prepared.config
    facts = RunFacts(
        seed=config.seed,
        sampler="none" if config.offline.is_on else config.sampler.kind,
        learner_backend=config.learner.backend,
        learner_ranks=config.resources.learner.num_workers,
        rollout_actors=0 if config.offline.is_on else config.resources.rollout.num_workers,
        train_prompts=len(prepared.splits[TRAIN].rows),
    )
    metrics.set_counts(CounterName.SKIPPED, count_by_reason(prepared.skipped))  # also what ended the run
    summary = summarize(metrics, facts, status=status, version=metrics.totals.version, wall_s=wall_s, error=error)
    with informing("the summary"):
        write_summary(prepared.folder / SUMMARY_FILE, summary)
        write_skipped(prepared.folder, prepared.skipped)
    with informing("the report"):
        write_report(prepared.folder)
    return summary


# `mobula report`: the report of a run that is over, from the files of its folder, also if its driver was killed.
#
# A driver that is killed writes no `summary.json`, or leaves that of an earlier part of the run. The summary is then
# made of the finished steps in `metrics.jsonl`. It is shown in the report and not written to the folder.


def report_again(name: str | Path | None) -> Path:
    """Write `report.html` of a run that is over, named as for `named_folder`; returns its path."""
    folder = named_folder(name, METRICS_FILE)
    has_dead_driver = _has_dead_driver(folder)
    try:
        run = read_run_folder(folder)
        is_killed = (
            has_dead_driver or run.summary is None or run.summary.version < (run.steps[-1].step if run.steps else 0)
        )
        path = write_report(folder, _summary_of_killed(folder, run) if is_killed else None)
        path.chmod(folder.stat().st_mode & 0o640)  # what `folder_access` is, also without a readable configuration
        return path
    except (ValueError, KeyError, OSError) as error:
        raise PreflightError(f"the report of {folder} cannot be written: {error}") from error


def earlier_wall_s(folder: Path) -> float:
    """Returns the wall seconds of the run's earlier parts, without parts that were killed."""
    try:
        return json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))["wall_s"]
    except (FileNotFoundError, ValueError, KeyError):
        return 0.0


def show_ended(name: str | Path | None, console: Console, *, is_json: bool) -> bool:
    """Prints the summary of a run that has ended; returns whether it has one."""
    folder = named_folder(name)
    if not (folder / SUMMARY_FILE).exists():
        return False
    summary = read_summary(folder / SUMMARY_FILE)
    if is_json:
        console.print((folder / SUMMARY_FILE).read_text(encoding="utf-8"), end="")
        return True
    lasted = f"{summary.num_steps} steps in {summary.wall_s:.0f} s"
    console.print(f"run {folder.name} is {summary.status} at version {summary.version}, after {lasted}")
    console.print(f"{headline(load_resolved(folder / CONFIG_FILE), summary)}; report: {folder / REPORT_FILE}")
    for warning in summary.warnings:
        console.print(f"warning: {warning}", style="yellow")
    return True


def _has_dead_driver(folder: Path) -> bool:
    """Whether the folder has the record of a killed driver; a run that ended in order has removed its record."""
    path = folder / RECORD_FILE
    try:
        record = RunRecord.read(path)
    except FileNotFoundError:
        return False
    except ValueError as error:
        raise PreflightError(str(error)) from error
    driver = record.mark.driver
    if driver.is_alive:
        raise PreflightError(
            f"run {record.run} is still running, in process {driver.pid}: it writes its report when it ends or is "
            f"stopped. `mobula top --run {folder}` shows it until then"
        )
    if not driver.is_here:
        raise PreflightError(
            f"run {record.run} may still be running: its driver is process {driver.pid} of {driver.host}. Call "
            f"`mobula report` there; if that machine is gone, remove {path} first"
        )
    return True


def _summary_of_killed(folder: Path, run: RunFolder) -> Summary:
    metrics = Metrics([], time.perf_counter, accuracy_component="")  # it measures no further step
    metrics.resume(read_records(folder / METRICS_FILE))
    metrics.set_counts(CounterName.SKIPPED, Counter(row.reason for row in run.skipped))
    totals = metrics.totals
    wall_s = max(earlier_wall_s(folder), totals.seconds["total"])
    return summarize(metrics, _facts(folder, run), status="killed", version=totals.version, wall_s=wall_s)


def _facts(folder: Path, run: RunFolder) -> RunFacts:
    """From the plan and the configuration, which may be one of an older version. The data are not read."""
    num_workers = Counter(row.role for row in run.plan)
    try:
        values = yaml.safe_load(run.config)
        return RunFacts(
            seed=values["seed"],
            sampler=values["sampler"]["kind"] if num_workers["rollout"] else "none",
            learner_backend=values["learner"]["backend"],
            learner_ranks=num_workers["learner"],
            rollout_actors=num_workers["rollout"],
            train_prompts=None,
        )
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / CONFIG_FILE} is no configuration of a run ({error!r}): restore it") from error
