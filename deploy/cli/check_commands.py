"""Commands that check a machine, a configuration, a run or a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from mobula.cluster.errors import FAILED
from mobula.configs.schema import RunConfig
from mobula.deploy.checks.lmms_eval import LmmsEval, evaluate
from mobula.deploy.cli.errors import explained
from mobula.deploy.cli.options import RUN, AuthOption, Overrides, RunFolder, RunName, run_and_words, takes
from mobula.deploy.host.authentication import set_auth
from mobula.deploy.host.terminal import signals_raise, terminal
from mobula.deploy.rehearsal.options import RehearseCommand


def plan(
    overrides: Overrides = None,
    address: Annotated[
        str | None, typer.Option(help="Plan for this Ray cluster (HOST:PORT, or auto), not for this machine.")
    ] = None,
    nodes: Annotated[
        str | None, typer.Option(metavar="NxGxMEMORY", help="Plan for nodes that are not there, e.g. 2x8x80GB.")
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plan for the nodes that a YAML file describes.")
    ] = None,
    auth: AuthOption = "disabled",
) -> None:
    """Show the node and the memory of each worker, and whether the run fits."""
    from mobula.configs.load import load_config

    with explained():
        config = load_config(overrides or [], is_complete=False)
        if address is not None:
            set_auth(auth)
        from mobula.deploy.planning.plan_command import show_plan

        planned = show_plan(config, terminal(soft_wrap=False), address=address, short=nodes, file=cluster)
        if planned is not None and not config.offline.is_on:
            from mobula.deploy.rehearsal.advice import show_advice

            show_advice(config, overrides or [], *planned, terminal(soft_wrap=True))


def doctor(
    overrides: Overrides = None,
    leftovers: Annotated[
        bool, typer.Option("--leftovers", help="List what dead runs left on this machine instead.")
    ] = False,
    free: Annotated[
        list[str] | None, typer.Option("--free", metavar="ID", help="End this leftover; more IDs may follow.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="Check every node of this Ray cluster, HOST:PORT; with --leftovers: look for placement groups there."
        ),
    ] = None,
    auth: AuthOption = "disabled",
) -> None:
    """Check that this machine, or every node of a cluster, can run a configuration; or list and end leftovers.

    Exits with 1 if that fails.
    """
    if address is not None:
        with explained():
            set_auth(auth)
    if leftovers or free:
        with explained():
            from mobula.deploy.run.run_client import show_leftovers

            num_left = show_leftovers([*(free or []), *(overrides or [])], address, terminal(soft_wrap=True))
        if num_left:
            raise typer.Exit(FAILED)
        return
    from mobula.configs.load import load_config
    from mobula.deploy.doctor.cluster import examine_cluster
    from mobula.deploy.doctor.this_machine import Verdict, check_checkpoint, check_start, examine

    colours = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.MISSING: "red"}
    console = terminal(soft_wrap=True)
    num_missing = 0
    with explained():
        config = load_config(overrides or [], is_complete=False)
        machine = examine(config) if address is None else examine_cluster(config, address)
        for finding in chain(machine, check_checkpoint(config), check_start(config)):
            num_missing += finding.verdict is Verdict.MISSING
            console.print(f"{finding.verdict:>8}", style=colours[finding.verdict], end="  ")
            console.print(f"{finding.name}: {finding.detail}")
            if finding.action:
                console.print(f"          -> {finding.action}")
    if num_missing:
        raise typer.Exit(FAILED)


def audit(
    name: RunName = None,
    run: RunFolder = None,
    head: Annotated[
        str,
        typer.Option(metavar="SHA256", help="A digest noted earlier, e.g. from run.log, that must be in the chain."),
    ] = "",
    key_env: Annotated[
        str, typer.Option("--key-env", metavar="VARIABLE", help="The environment variable with the key of the run.")
    ] = "",
    weights: Annotated[
        bool, typer.Option("--weights", help="Compare checkpoints with the checksums of the pushed weights, too.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare a run's files with its chain of records: tokens too old, groups lost or trained twice, files altered or
    added. Exits with 1 on a finding. The last lines say what is proven and what is not.
    """
    with explained():
        from mobula.deploy.report.audit import audit as run_audit

        code = run_audit(
            name, run, terminal(soft_wrap=True), head=head, key_env=key_env, has_weights=weights, is_json=json
        )
        raise typer.Exit(code)


def diagnose(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN | KEY=VALUE...]",
            help=f"{RUN} The latest one if it is left out. Overrides check a configuration before its first step.",
        ),
    ] = None,
    run: RunFolder = None,
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
        terminal(soft_wrap=True).print(to_json(findings))
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


def gpu_check(
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="The device that is checked.")] = "cuda",
    only: Annotated[
        list[str] | None, typer.Option(metavar="STAGE", help="Run this stage, finished or not; may be repeated.")
    ] = None,
    run_all: Annotated[bool, typer.Option("--all", help="Long stages too where the device is a CPU.")] = False,
    minutes: Annotated[float | None, typer.Option(min=0.5, help="Time of this call; the next one goes on.")] = None,
    folder: Annotated[Path, typer.Option(help="Where results and logs go.")] = Path("runs/gpu-check"),
) -> None:
    """Check a machine stage by stage: torch, learner, packing, FSDP2, flow, memory, vLLM, NCCL, the main job, speed.

    Each stage runs in a separate process and is one row: passed, failed with the cause, or not here with what is
    missing. `gpu_check.json` in the folder keeps finished stages, which the next call skips. Without Ray, vLLM, Hydra
    and this command `python -m mobula.deploy.checks.gpu_check` does the same from a checkout. Exits with 1 if a stage
    failed.
    """
    from mobula.deploy.checks.gpu_check.check import CheckOptions, run_check

    budget_s = None if minutes is None else 60 * minutes
    raise typer.Exit(run_check(CheckOptions(device, folder, tuple(only or ()), run_all, budget_s)))


@takes(RehearseCommand)
def rehearse(command: RehearseCommand) -> None:
    """Play a cluster run on this machine: real driver code, simulated engines and learner ranks, virtual time."""
    with explained():
        from mobula.deploy.rehearsal.command import rehearse as play

        run, overrides = run_and_words(command.overrides, command.run)
        play(replace(command, run=None if run is None else Path(run), overrides=overrides), terminal(soft_wrap=False))


@takes(LmmsEval)
def lmms_eval(options: LmmsEval) -> None:
    """Evaluate a model with the public harness lmms-eval, in its own environment (`make harness`)."""
    console = terminal(soft_wrap=True)
    with explained("what was scored until now is in the run's log alone; run it again"):
        with signals_raise():
            path, artifact = evaluate(options, lambda line: console.print(line))
    terminal().print(_table(artifact))
    console.print(
        f"mean score {_figure(artifact['mean_primary_score'], 4)}, {artifact['num_samples']} samples in "
        f"{artifact['seconds']:.1f} s"
    )
    console.print(f"written: {path}")


def _table(artifact: Mapping[str, Any]) -> Table:
    table = Table(title=f"lmms-eval {artifact['versions']['lmms-eval']}: {artifact['model']}")
    for name in ("task", "metric"):
        table.add_column(name, overflow="fold")
    for name in ("score", "stderr", "samples", "empty", "tokens"):  # answers without a character; tokens an answer
        table.add_column(name, justify="right")
    for task in artifact["tasks"]:
        metric = task["primary_metric"]
        table.add_row(
            task["task"],
            metric or "-",
            _figure(task["primary_score"], 4),
            _figure(task["stderr"].get(_stderr_name(metric or "")), 4),
            str(task["num_samples"]),
            str(task["num_empty_answers"]),
            _figure(task["mean_output_tokens"], 1),
        )
    return table


def _stderr_name(metric: str) -> str:
    name, comma, filtered = metric.partition(",")
    return f"{name}_stderr{comma}{filtered}"


def _figure(value: float | None, num_digits: int) -> str:
    return "-" if value is None else f"{value:.{num_digits}f}"
