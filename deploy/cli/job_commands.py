"""Commands of jobs on a Ray cluster: submit, stop, logs and list."""

from __future__ import annotations

import math
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from mobula.cluster.errors import PreflightError
from mobula.cluster.failures import COLOUR, escaped
from mobula.deploy.cli.errors import explained
from mobula.deploy.cli.options import AuthOption
from mobula.deploy.host.terminal import terminal

JOB_GOES_ON = "the job goes on; `mobula logs ID` follows it and `mobula stop ID` ends it"
CLOSE_S = 60  # that a stopped run has besides to close its roles and to write its report

Address = Annotated[
    str, typer.Option("--address", envvar="RAY_API_SERVER_ADDRESS", help="The cluster's dashboard, http://HOST:8265.")
]
JobId = Annotated[str, typer.Argument(metavar="ID", help="The job's id, as `mobula list` shows it.")]


def submit(
    address: Address,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="As for train.")] = None,
    auth: AuthOption = "disabled",
    working_dir: Annotated[
        Path | None, typer.Option(help="Send this folder's code: the working directory, if the words name files of it.")
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Leave this out of the folder, as in a .gitignore.")] = None,
    python: Annotated[str, typer.Option(help="The Python of the cluster's environment.")] = sys.executable,
    env: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="A variable of the job.")] = None,
    submission_id: Annotated[str | None, typer.Option("--id", help="The job's id; else the run's name.")] = None,
    stop_wait: Annotated[
        int | None,
        typer.Option(min=3, help="Seconds that a stopped run has to end; else timeouts.stop_checkpoint_s and 60."),
    ] = None,
    start_timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait until it runs.")] = 600.0,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Show its log, and end as it ends.")] = True,
) -> None:
    """Train as a job of a Ray cluster; sent again under the same name it resumes. Ends with the job's exit code."""
    from mobula.cluster.user_code import user_files
    from mobula.configs.load import load_config
    from mobula.configs.overrides import TASKS_VARIABLE
    from mobula.deploy.jobs.client import Jobs

    with explained(JOB_GOES_ON):
        config = load_config(overrides or [])
        pairs = [text.partition("=") for text in env or []]
        if bad := [name for name, equals, _ in pairs if not (name and equals)]:
            raise PreflightError(f"--env {bad[0]}: write NAME=VALUE")
        jobs = Jobs(address, auth)
        from mobula.deploy.jobs.submit import Submission
        from mobula.deploy.jobs.submit import submit as send

        tasks = os.environ.get(TASKS_VARIABLE, "")
        variables = {TASKS_VARIABLE: tasks} if tasks else {}
        variables |= {name: value for name, _, value in pairs}
        wait_s = stop_wait or math.ceil(config.timeouts.stop_checkpoint_s) + CLOSE_S
        names = [*user_files(config.model_dump(mode="json")), *filter(None, tasks.split(":"))]
        if working_dir is None and not all(Path(name).is_absolute() for name in names):
            working_dir = Path()  # the user's code and tasks go along
        submission = Submission(auth, working_dir, tuple(exclude or ()), python, wait_s, submission_id, variables)
        job_id = send(config, overrides or [], submission, jobs)
        terminal(soft_wrap=True).print(f"job {job_id} submitted to {address}")
        jobs.wait_until_started(job_id, start_timeout)
        if follow:
            _end(jobs.follow(job_id, _write))


def stop(
    job: JobId,
    address: Address,
    auth: AuthOption = "disabled",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait for its end.")] = 180.0,
) -> None:
    """Stop a job in good order: it writes a checkpoint, which a resubmission goes on from, summary and report."""
    from mobula.deploy.jobs.client import Jobs

    with explained(JOB_GOES_ON):
        code = Jobs(address, auth).stop(job, timeout)
    shown = {0: "done", 130: "stopped; submit the same words again to go on"}.get(code, f"failed with exit code {code}")
    terminal(soft_wrap=True).print(f"job {job}: {shown}")


def logs(
    job: JobId,
    address: Address,
    auth: AuthOption = "disabled",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the job ends, and end as it ends.")] = False,
) -> None:
    """Show what a job printed."""
    from mobula.deploy.jobs.client import Jobs

    with explained(JOB_GOES_ON):
        jobs = Jobs(address, auth)
        if follow:
            _end(jobs.follow(job, _write))
        _write(jobs.logs(job))


def list_jobs(address: Address, auth: AuthOption = "disabled") -> None:
    """List the jobs of a Ray cluster, the newest first."""
    from mobula.deploy.jobs.client import Jobs

    with explained(JOB_GOES_ON):
        jobs = Jobs(address, auth).all()
    table = Table("job", "run", "status", "started", "took")
    for job in jobs:
        started = "" if job.started is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.started))
        took = "" if job.started is None else f"{(job.ended or time.time()) - job.started:.0f} s"
        table.add_row(job.submission_id, job.run, job.status.lower(), started, took)
    terminal().print(table)


def _write(text: str) -> None:
    sys.stdout.write(escaped(COLOUR.sub("", text).replace("\r", "\n")))
    sys.stdout.flush()


def _end(code: int) -> None:
    raise typer.Exit(code)
