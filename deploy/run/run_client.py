"""Client of a running run: finds it, reads its status, scales its roles."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

from mobula.cluster.errors import DeadlineError, PreflightError, RunOverError, WorkerDiedError
from mobula.cluster.workers.status import RoleOutcome, RunStatus, ScaleRequest
from mobula.configs.schema.run import LATEST
from mobula.deploy.host.authentication import connected
from mobula.deploy.host.processes import in_side_process
from mobula.deploy.host.run_folder import RECORD_FILE, RunRecord

T = TypeVar("T")

RUNS = Path("runs")
SUMMARY = "summary.json"
KNOCK_TIMEOUT_S = 5.0
POLL_INTERVAL_S = 0.2
PANEL_GONE_S = 10.0  # a panel that died is back sooner; a run without one for so long is over
RESERVE_S = 5.0  # of a deadline: for the process that asks to start, and to say what it was that it waited for


@dataclass(frozen=True)
class RunAddress:
    """Address of a run's control interface."""

    run: str
    address: str  # HOST:PORT of the cluster's control store
    namespace: str
    folder: Path | None = field(default=None, compare=False)  # None where the cluster was named instead


def named_folder(run: str, file: str) -> Path:
    """The folder of a run that is named by its folder, or by its name below `runs`; `file` shows that it is one."""
    for folder in (Path(run), RUNS / run):
        if (folder / file).is_file():
            return folder
    raise PreflightError(f"there is no run in {run} or {RUNS / run}: give the run's FOLDER, or its NAME below {RUNS}")


def find_run(name: str | None, folder: Path | None, address: str | None) -> RunAddress:
    """Finds a run: by `name` on the cluster at `address`, else by `folder`, else the latest one."""
    if address is not None:
        if name is None:
            raise PreflightError("--address needs the run's NAME as well: several runs may share one cluster")
        return RunAddress(name, address, name)
    run_folder = folder if folder is not None else RUNS / (name or LATEST)
    if not run_folder.is_dir():
        raise PreflightError(f"there is no run folder {run_folder}: give the run's NAME, or --run FOLDER")
    run = run_folder.resolve().name
    try:
        record = RunRecord.read(run_folder / RECORD_FILE)
    except FileNotFoundError as error:
        raise RunOverError(f"run {run} is not going on{_how_it_ended(run_folder)}") from error
    except ValueError as error:
        raise PreflightError(str(error)) from error
    driver = record.mark.driver
    if driver.is_here and not driver.is_alive:
        raise RunOverError(
            f"run {run} is dead: its driver, process {driver.pid}, was killed. `mobula report {run_folder}` writes its "
            "report, `mobula doctor --leftovers` shows what it left behind, and the same words with resume=auto go on"
        )
    return RunAddress(record.run, record.address, record.namespace, run_folder.resolve())


def read_status(run: RunAddress, timeout_s: float) -> RunStatus:
    """The run's current status."""
    return _asked(_read_status, timeout_s, f"the status of run {run.run}", run, timeout_s - RESERVE_S)


def statuses(run: RunAddress, timeout_s: float) -> Iterator[RunStatus]:
    """The run's status, repeatedly, over one connection of this process."""
    _check_goes_on(run)
    with connected(run.address, run.namespace) as ray:
        while True:
            panel = _Panel(ray, run, timeout_s)
            yield panel.ask_until_known(lambda handle: handle.status.remote(), "say its status")


def scale(run: RunAddress, wanted: Mapping[str, int], timeout_s: float) -> tuple[RoleOutcome, ...]:
    """Requests numbers of workers from the run; returns the outcome for each role."""
    request = ScaleRequest(uuid4().hex, dict(wanted))
    return _asked(_scale, timeout_s, f"run {run.run} to scale", run, request, timeout_s - RESERVE_S)


def knock(address: str, consequence: str) -> None:
    """Fails at once if no process listens at `address`; `consequence` starts the message."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=KNOCK_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        raise RunOverError(f"{consequence}: no Ray cluster answers at {address} ({error})") from error


def knock_http(address: str) -> None:
    """Fail at once where no HTTP server listens at `address`, http://HOST:PORT."""
    url = urlsplit(address)
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        socket.create_connection((url.hostname, port), timeout=KNOCK_TIMEOUT_S).close()
    except OSError as error:
        raise PreflightError(
            f"no Ray dashboard answers at {address} ({error}): give --address http://HEAD:8265 of a cluster that runs"
        ) from error


def _asked(work: Callable[..., T], timeout_s: float, purpose: str, run: RunAddress, *args: object) -> T:
    """The result of `work` in a side process. For a run that ended meanwhile the error states that it is over."""
    _check_goes_on(run)
    try:
        return in_side_process(work, timeout_s, purpose, run, *args)
    except (DeadlineError, WorkerDiedError):
        if run.folder is not None:
            find_run(None, run.folder, None)
        _check_goes_on(run)
        raise


def _check_goes_on(run: RunAddress) -> None:
    knock(run.address, f"run {run.run} is over")


def _how_it_ended(folder: Path) -> str:
    try:
        status = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))["status"]
    except (OSError, ValueError, KeyError):
        return f" (no {RECORD_FILE} in {folder}): it has not begun, or ended before it could say how"
    return f": it is {status}, and {folder / 'report.html'} tells the rest"


def _read_status(run: RunAddress, timeout_s: float) -> RunStatus:
    with connected(run.address, run.namespace) as ray:
        return _Panel(ray, run, timeout_s).ask_until_known(lambda handle: handle.status.remote(), "say its status")


def _scale(run: RunAddress, request: ScaleRequest, timeout_s: float) -> tuple[RoleOutcome, ...]:
    with connected(run.address, run.namespace) as ray:
        panel = _Panel(ray, run, timeout_s)
        return panel.ask_until_known(lambda handle: handle.ask.remote(request), "apply the request")


class _Panel:
    """The current control panel actor of a run; a dead panel is replaced by a new one."""

    def __init__(self, ray: Any, run: RunAddress, timeout_s: float) -> None:
        self._ray = ray
        self._run = run
        self._deadline = time.monotonic() + timeout_s

    def ask_until_known(self, call: Callable[[Any], Any], request: str) -> Any:
        """The first answer that is not None."""
        while time.monotonic() < self._deadline:
            answer = self.ask(call)
            if answer is not None:
                return answer
            time.sleep(POLL_INTERVAL_S)
        raise DeadlineError(f"the driver of run {self._run.run} did not {request} in time: it is busy, or hangs")

    def ask(self, call: Callable[[Any], Any]) -> Any:
        """Returns the panel's answer; waits for the replacement of a dead panel."""
        from mobula.cluster.runtime.ray_actors import PROCESS_GONE
        from mobula.cluster.workers.control import CONTROL

        gone_at = min(self._deadline, time.monotonic() + PANEL_GONE_S)
        while True:
            try:
                handle = self._ray.get_actor(CONTROL, namespace=self._run.namespace)
                return self._ray.get(call(handle), timeout=max(0.0, self._deadline - time.monotonic()))
            except TimeoutError as error:
                raise DeadlineError(f"the control panel of run {self._run.run} did not answer in time") from error
            except (ValueError, *PROCESS_GONE) as error:
                if time.monotonic() > gone_at:
                    raise RunOverError(
                        f"run {self._run.run} is over: the cluster at {self._run.address} has no run of this name"
                    ) from error
                time.sleep(POLL_INTERVAL_S)
