"""`mobula submit`: a run as a job of a Ray cluster, checked here before anything is sent."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray._private.ray_constants import get_runtime_env_default_excludes
from ray._private.runtime_env.packaging import _dir_travel, _get_excludes  # the walk that Ray packs by

from mobula.cluster.errors import PreflightError
from mobula.configs.schema import RunConfig
from mobula.deploy.host.authentication import AuthMode
from mobula.deploy.jobs.client import Jobs
from mobula.deploy.run.node_network import refuse_relative

LIMIT_BYTES = 100 * 2**20  # Ray refuses a larger package over its jobs API
NUM_SHOWN = 5
EXCLUDES = ("/runs", "/data", "/outputs", ".pytest_cache", ".ruff_cache", "*.safetensors")
MIB = 2**20


def check_package(folder: Path, excludes: Sequence[str], limit_bytes: int = LIMIT_BYTES) -> int:
    """Returns the uncompressed bytes of the package. Stricter than Ray, which checks the compressed size.

    `.gitignore` and `.rayignore` apply, as for Ray.
    """
    if not folder.is_dir():
        raise PreflightError(f"--working-dir {folder} is no folder: name the folder that holds the code to run")
    sizes: dict[Path, int] = {}

    def weigh(path: Path) -> None:
        if path.is_file():
            sizes[path.relative_to(root)] = path.stat().st_size

    root = folder.resolve()
    patterns = [*get_runtime_env_default_excludes(), *excludes]
    _dir_travel(root, [_get_excludes(root, patterns)], weigh, include_gitignore=True)
    total = sum(sizes.values())
    if total <= limit_bytes:
        return total
    largest = sorted(sizes, key=lambda path: -sizes[path])[:NUM_SHOWN]
    shown = ", ".join(f"{path} ({sizes[path] / MIB:.1f} MiB)" for path in largest)
    raise PreflightError(
        f"--working-dir {folder} holds {total / MIB:.1f} MiB in {len(sizes)} files, more than the "
        f"{limit_bytes / MIB:.0f} MiB that Ray's jobs API takes. The largest are {shown}: leave them out with "
        "--exclude PATTERN or a .rayignore file, and keep data and models on a file system that all nodes see"
    )


ACTIVE = ("PENDING", "RUNNING")


@dataclass(frozen=True)
class Submission:
    """Options of a submission besides the run's overrides."""

    auth: AuthMode
    working_dir: Path | None  # None: the package is installed on every node
    excludes: tuple[str, ...]
    python: str  # of the cluster's environment, the same on every node
    stop_wait_s: int  # that a stopped run has to write its checkpoint and to close its roles
    submission_id: str | None  # None: the run's name, or with a number behind it
    env: Mapping[str, str] = field(default_factory=dict)


def submit(config: RunConfig, overrides: Sequence[str], submission: Submission, jobs: Jobs) -> str:
    """Starts the run; returns the id of the job, which has a number if an earlier job of this name is over."""
    refuse_relative(config)
    if submission.working_dir is not None:
        check_package(submission.working_dir, [*EXCLUDES, *submission.excludes])
    submission_id = _free_id(config.name, submission.submission_id, jobs)
    jobs.submit(submission_id, entrypoint(overrides, submission), runtime_env(submission), {"run": config.name})
    return submission_id


def entrypoint(overrides: Sequence[str], submission: Submission) -> str:
    """Returns the job's command line. It resumes by default, so that the same job can be submitted again.

    A working directory with a checkout of Mobula runs the checkout's code instead of the installed version.
    """
    resume = [] if any(override.startswith("resume=") for override in overrides) else ["resume=auto"]
    is_checkout = submission.working_dir is not None and (submission.working_dir / "deploy" / "package").is_dir()
    command = "deploy.cli" if is_checkout else "mobula.deploy.cli"
    return shlex.join([submission.python, "-m", command, "train", *overrides, *resume])


def runtime_env(submission: Submission) -> dict[str, Any]:
    """Ray's runtime environment of the job: its variables and, if one is sent, its working folder."""
    variables = {
        "RAY_AUTH_MODE": submission.auth,
        "RAY_JOB_STOP_WAIT_TIME_S": str(submission.stop_wait_s),
        "NO_COLOR": "1",
        **submission.env,
    }
    env: dict[str, Any] = {"env_vars": variables}
    if submission.working_dir is not None:
        env |= {"working_dir": str(submission.working_dir.resolve()), "excludes": [*EXCLUDES, *submission.excludes]}
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
