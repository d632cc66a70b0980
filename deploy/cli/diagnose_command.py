"""`mobula diagnose`, and the diagnosis that `mobula train` adds to its report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from mobula.configs.schema import RunConfig
from mobula.deploy.cli.errors import FAILED, explained
from mobula.deploy.host.terminal import terminal


def diagnose(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME | KEY=VALUE...]",
            help="The run; the latest one if it is left out. Overrides check a configuration before its first step.",
        ),
    ] = None,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="FOLDER", help="The run's folder, where it is not runs/NAME.")
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also train and score recorded groups (replay.trajectory_log); minutes.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Why does it not learn? Check a run, or a configuration, and show the findings, worst first.

    The findings are added to the report of a run that has ended. Exits with 1 if there is a fault.
    """
    with explained():
        from mobula.cluster.metrics.report.run_folder import in_folder
        from mobula.deploy.host.run_folder import file_access
        from mobula.deploy.report.diagnose import command

        subject = command.subject_of(words or [], run)
        with file_access(subject.material.config):
            findings = command.diagnose(subject, is_deep=deep)
            if subject.folder is not None:
                command.add_to_report(subject.folder, findings)
        findings = in_folder(findings, command.pictures_folder(subject))
    from mobula.cluster.metrics.report.run_folder import RunVerdict, to_json
    from mobula.deploy.report.diagnose.command import show

    if json:
        terminal(soft_wrap=True).print(to_json(findings), markup=False, highlight=False)
    else:
        show(subject.title, findings, terminal())
    if any(finding.verdict is RunVerdict.FAULT for finding in findings):
        raise typer.Exit(FAILED)


@contextmanager
def diagnosed(config: RunConfig) -> Iterator[None]:
    """Adds the diagnosis of the run's records to its report, however the run ends."""
    try:
        yield
    finally:
        from mobula.cluster.metrics.hub import informing
        from mobula.cluster.metrics.report.run_folder import REPORT_FILE

        if not config.offline.is_on and (config.run_folder / REPORT_FILE).is_file():
            from mobula.deploy.host.run_folder import file_access

            with informing("the diagnosis"), file_access(config):
                from mobula.deploy.report.diagnose.command import diagnose_records

                diagnose_records(config.run_folder)
