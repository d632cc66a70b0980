"""`mobula submit`: a run as a job of a Ray cluster, checked here before anything is sent."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mobula.cluster.errors import PreflightError
from mobula.configs.schema import RunConfig
from mobula.deploy.host.authentication import AuthMode
from mobula.deploy.jobs.client import Jobs
from mobula.deploy.jobs.package import EXCLUDES, check_package
from mobula.deploy.run.shared_paths import refuse_relative

ACTIVE = ("PENDING", "RUNNING")


@dataclass(frozen=True)
class Submission:
    """Content of a submission beside the run's words."""

    auth: AuthMode
    working_dir: Path | None  # None: the package is installed on every node
    excludes: tuple[str, ...]
    python: str  # of the cluster's environment, the same on every node
    stop_wait_s: int  # that a stopped run has to write its checkpoint and to close its roles
    submission_id: str | None  # None: the run's name, or with a number behind it
    env: Mapping[str, str] = field(default_factory=dict)


def submit(config: RunConfig, words: Sequence[str], asked: Submission, jobs: Jobs) -> str:
    """Start the run; returns the job's id.

    A run of the same name whose job is over is resumed: its job gets a number behind the name.

    Raises:
        PreflightError: paths are relative, the package is too large, or the run goes on already.
    """
    refuse_relative(config)
    if asked.working_dir is not None:
        check_package(asked.working_dir, [*EXCLUDES, *asked.excludes])
    submission_id = _free_id(config.name, asked.submission_id, jobs)
    jobs.submit(submission_id, entrypoint(words, asked), runtime_env(asked), {"run": config.name})
    return submission_id


def entrypoint(words: Sequence[str], asked: Submission) -> str:
    """The command line of the job. It resumes unless the words say otherwise, so that it can be sent again.

    A working directory that is a checkout of Mobula runs its own code, also where another version is installed.
    """
    resume = [] if any(word.startswith("resume=") for word in words) else ["resume=auto"]
    is_checkout = asked.working_dir is not None and (asked.working_dir / "deploy" / "package").is_dir()
    command = "deploy.cli" if is_checkout else "mobula.deploy.cli"
    return shlex.join([asked.python, "-m", command, "train", *words, *resume])


def runtime_env(asked: Submission) -> dict[str, Any]:
    """Ray's runtime environment of the job: its variables and, if one is sent, its working folder."""
    variables = {
        "RAY_AUTH_MODE": asked.auth,
        "RAY_JOB_STOP_WAIT_TIME_S": str(asked.stop_wait_s),
        "NO_COLOR": "1",
        **asked.env,
    }
    env: dict[str, Any] = {"env_vars": variables}
    if asked.working_dir is not None:
        env |= {"working_dir": str(asked.working_dir.resolve()), "excludes": [*EXCLUDES, *asked.excludes]}
    return env


def _free_id(name: str, wanted: str | None, jobs: Jobs) -> str:
    listed = jobs.all()
    active = [job for job in listed if job.status in ACTIVE and (job.run == name or job.submission_id == wanted)]
    if active:
        raise PreflightError(
            f"run {name} goes on already, as job {active[0].submission_id} ({active[0].status.lower()}): follow it "
            f"with `mobula logs {active[0].submission_id}`, stop it first, or give name=ANOTHER"
        )
    taken = {job.submission_id for job in listed}
    if wanted is not None:
        if wanted in taken:
            raise PreflightError(
                f"there was a job {wanted} already, and Ray keeps its id: leave --id out, or change it"
            )
        return wanted
    number = 1
    while (candidate := name if number == 1 else f"{name}-{number}") in taken:
        number += 1
    return candidate
