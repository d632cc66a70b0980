"""`mobula diagnose`: the command and its page."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import gettempdir

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mobula.cluster.errors import PreflightError
from mobula.cluster.metrics.report.run_folder import (
    CONFIG_FILE,
    REPORT_FILE,
    RunFinding,
    RunFolder,
    RunVerdict,
    causes_first,
    read_run_folder,
    with_files,
    write_findings,
)
from mobula.cluster.records.media import MediaStore
from mobula.configs.load import load_config, load_resolved
from mobula.configs.schema import RunConfig
from mobula.deploy.doctor.this_machine import is_here
from mobula.deploy.preflight.checks import LoadedModel
from mobula.deploy.report.diagnose import data_checks, reward_checks, update_checks
from mobula.deploy.report.diagnose.material import CHECKS, DataSurvey, Material, run_checks, survey
from mobula.deploy.run.run_client import named_folder
from mobula.deploy.run.run_report import report_again
from mobula.deploy.wiring.preparation import ensure_data, load_checked

MODULES = (data_checks, update_checks, reward_checks)  # whose import has filled CHECKS


@dataclass(frozen=True)
class Subject:
    """What is diagnosed: a run in `folder`, or a configuration, without a folder."""

    title: str
    material: Material
    folder: Path | None = None


def subject_of(words: Sequence[str], folder: Path | None) -> Subject:
    """Returns a configuration if `words` are overrides, else a run."""
    if folder is None and any("=" in word for word in words):
        config = load_config(words)
        material = Material(config, None, partial(_written, config), partial(_loaded, config))
        return Subject(f"configuration {config.name}", material)
    if len(words) > 1:
        raise PreflightError(f"{' '.join(words)}: name one run, or give overrides (KEY=VALUE)")
    run_folder = named_folder(folder or next(iter(words), None))
    config = load_resolved(run_folder / CONFIG_FILE)
    run = _read(run_folder)
    material = Material(config, run, partial(survey, config), partial(_loaded, config))
    return Subject(f"run {run.name}", material, run_folder)


def add_to_report(folder: Path, findings: Sequence[RunFinding]) -> None:
    """Writes `diagnosis.json` of a run and, if the run has ended with a report, its report again."""
    write_findings(folder, findings)
    if (folder / REPORT_FILE).is_file():
        with suppress(PreflightError):  # the run goes on, and writes its report at its end
            report_again(str(folder))


def diagnose_records(folder: Path) -> None:
    """Diagnoses the records of a run that has ended, without data and model, and adds the findings to its report."""
    config = load_resolved(folder / CONFIG_FILE)
    found = causes_first(list(run_checks(CHECKS, Material(config, _read(folder)))))
    add_to_report(folder, [finding for finding in found if finding.verdict is not RunVerdict.NOT_MEASURED])


def diagnose(subject: Subject, *, is_deep: bool = False) -> list[RunFinding]:
    """Runs all checks, with `is_deep` also the trials on recorded groups; the worst findings are first."""
    findings = list(run_checks(CHECKS, subject.material))
    if is_deep:
        from mobula.deploy.report.diagnose.trials import run_trials  # which imports the session of Ray

        findings += run_trials(subject.folder, subject.material.config)
    return with_files(causes_first(findings), pictures_folder(subject))


def pictures_folder(subject: Subject) -> Path:
    """Returns the folder below which pictures of findings are written: of the run, or a temporary folder."""
    if subject.folder is not None:
        return subject.folder
    folder = Path(gettempdir()) / f"mobula-{os.getuid()}-{subject.material.config.name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PreflightError(f"{folder} is of another user: set TMPDIR to a folder of yours, or name to another")
    return folder


def _read(folder: Path) -> RunFolder:
    try:
        return replace(read_run_folder(folder), name=folder.resolve().name)
    except (ValueError, KeyError, OSError) as error:
        raise PreflightError(f"the run in {folder} cannot be read: {error}") from error


def _written(config: RunConfig) -> DataSurvey | None:
    ensure_data(config)
    return survey(config)


def _loaded(config: RunConfig) -> LoadedModel | None:
    """Returns the model's checked files; None if they are not on this machine and no words write them."""
    if not is_here(config) and config.policy.tiny == "none":
        return None
    return load_checked(config, MediaStore(lambda media: media, config.data.media_cache_bytes))


STYLES = {
    RunVerdict.FAULT: "bold red",
    RunVerdict.WARNING: "yellow",
    RunVerdict.NOTICE: "cyan",
    RunVerdict.OK: "green",
    RunVerdict.NOT_MEASURED: "dim",
}


def show(title: str, findings: Sequence[RunFinding], console: Console) -> None:
    """Prints one row a finding, with its next action and its evidence below it."""
    counts = Counter(finding.verdict for finding in findings)
    console.print(f"{title}: " + ", ".join(f"{counts[v]} {v}" for v in RunVerdict if counts[v]))
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for finding in findings:
        table.add_row(Text(finding.verdict, style=STYLES[finding.verdict]), finding.name, _details(finding))
    console.print(table)


def _details(finding: RunFinding) -> Text:
    text = Text(finding.measured)
    if finding.action:
        text.append(f"\n-> {finding.action}", style="bold")
    if finding.verdict in (RunVerdict.FAULT, RunVerdict.WARNING):
        for evidence in finding.evidence:
            text.append(f"\n   {evidence.text}", style="dim")
            for image in evidence.images:
                text.append(f"\n   picture: {image}", style="dim")
    return text
