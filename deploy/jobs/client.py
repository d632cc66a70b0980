"""The jobs of a Ray cluster, asked over its dashboard's HTTP address."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from mobula.cluster.errors import DeadlineError, PreflightError
from mobula.deploy.host.authentication import AuthMode, explain_refusal, set_auth
from mobula.deploy.run.run_client import knock_http

POLL_S = 0.5
STOPPED = 130
LOST = 1


@dataclass(frozen=True)
class JobSummary:
    submission_id: str
    status: str
    run: str  # the run's name, empty for a job that mobula did not submit
    started: float | None  # seconds since the epoch
    ended: float | None
    message: str


class Jobs:
    """The jobs at one address. `auth` is what the cluster was started with; Ray would guess otherwise."""

    def __init__(self, address: str, auth: AuthMode) -> None:
        """Raises: PreflightError: it is no HTTP address, no dashboard answers there, or it refuses the token."""
        url = urlsplit(address)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise PreflightError(f"--address {address} is no address of a Ray dashboard: write http://HOST:8265")
        set_auth(auth)
        knock_http(address)
        from ray.dashboard.modules.job.sdk import JobSubmissionClient
        from ray.exceptions import AuthenticationError

        logging.getLogger(JobSubmissionClient.__module__).setLevel(logging.WARNING)  # it says when its socket closes
        self._address = address
        try:
            self._client = JobSubmissionClient(address)
        except AuthenticationError as error:
            explain_refusal(f"the Ray dashboard at {address}", error)
        except (RuntimeError, ConnectionError) as error:
            raise PreflightError(
                f"the Ray dashboard at {address} refuses this client ({_first_line(error)}): see that --auth={auth} is "
                "what the cluster was started with, and that its Ray is this one's version"
            ) from error

    def submit(
        self, submission_id: str, entrypoint: str, runtime_env: Mapping[str, Any], metadata: Mapping[str, str]
    ) -> None:
        """Start a job under this id, which must be free."""
        try:
            self._client.submit_job(
                entrypoint=entrypoint,
                submission_id=submission_id,
                runtime_env=dict(runtime_env),
                metadata=dict(metadata),
            )
        except (RuntimeError, ValueError) as error:
            raise PreflightError(f"Ray refuses job {submission_id}: {_first_line(error)}") from error

    def find(self, submission_id: str) -> JobSummary | None:
        return next((job for job in self.all() if job.submission_id == submission_id), None)

    def all(self) -> list[JobSummary]:
        """Every job that was submitted, the newest first."""
        rows = [
            JobSummary(
                job.submission_id,
                str(job.status),
                (job.metadata or {}).get("run", ""),
                job.start_time and job.start_time / 1000,
                job.end_time and job.end_time / 1000,
                job.message or "",
            )
            for job in self._client.list_jobs()
            if job.submission_id
        ]
        return sorted(rows, key=lambda row: -(row.started or 0.0))

    def wait_until_started(self, submission_id: str, timeout_s: float) -> None:
        if not self._becomes(submission_id, lambda status: str(status) != "PENDING", timeout_s):
            reason = self._client.get_job_info(submission_id).message
            raise DeadlineError(
                f"waited {timeout_s:g} s for job {submission_id} to start: {reason}. "
                f"`mobula stop {submission_id} --address {self._address}` takes it back"
            )

    def logs(self, submission_id: str) -> str:
        self._require(submission_id)
        return self._client.get_job_logs(submission_id)

    def follow(self, submission_id: str, write: Callable[[str], None]) -> int:
        self._require(submission_id)

        async def pass_on() -> None:
            async for lines in self._client.tail_job_logs(submission_id):
                write(lines)

        asyncio.run(pass_on())
        return self.exit_code(submission_id)

    def stop(self, submission_id: str, timeout_s: float) -> int:
        """Stops the job and waits for its end; returns its exit code."""
        self._require(submission_id)
        self._client.stop_job(submission_id)
        if not self._becomes(submission_id, lambda status: status.is_terminal(), timeout_s):
            raise DeadlineError(
                f"waited {timeout_s:g} s for job {submission_id} to end: it is still stopping, so look again with "
                "`mobula list`, or give a longer --timeout"
            )
        return self.exit_code(submission_id)

    def exit_code(self, submission_id: str) -> int:
        """0 done, 130 stopped, else the code of the command, or 1 where it has none (its node is gone)."""
        info = self._client.get_job_info(submission_id)
        match str(info.status):
            case "SUCCEEDED":
                return 0
            case "STOPPED":
                return STOPPED
            case "FAILED":
                return info.driver_exit_code or LOST
        return LOST

    def _becomes(self, submission_id: str, is_wanted: Callable[[Any], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not (is_reached := is_wanted(self._client.get_job_status(submission_id))):
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        return is_reached

    def _require(self, submission_id: str) -> None:
        if self.find(submission_id) is None:
            known = ", ".join(job.submission_id for job in self.all()[:5]) or "none"
            raise PreflightError(f"there is no job {submission_id} at {self._address}; the newest are: {known}")


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else repr(error)
