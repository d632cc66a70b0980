"""Client of runs: finds a running run, reads its status, scales its roles; frees what dead runs left."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

from rich.console import Console

from mobula.cluster.errors import DeadlineError, MobulaError, PreflightError, RunOverError, WorkerDiedError
from mobula.cluster.metrics.report.run_folder import CONFIG_FILE
from mobula.cluster.workers.status import RoleOutcome, RunStatus, ScaleRequest
from mobula.configs.load import load_resolved
from mobula.configs.schema import RunConfig
from mobula.configs.schema.run import LATEST
from mobula.deploy.host.authentication import connected
from mobula.deploy.host.processes import MarkedProcess, ProcessId, end, holders, in_side_process, marked_processes
from mobula.deploy.host.run_folder import RECORD_FILE, RUN_VARIABLE, SESSION_FILE, RunMark, RunRecord

T = TypeVar("T")
RUNS = Path("runs")
SUMMARY = "summary.json"
NUM_SHOWN_RUNS = 3
MORE_STEPS = re.compile(r"^num_steps=\+(\d+)$")
KNOCK_TIMEOUT_S = 5.0
POLL_INTERVAL_S = 0.2
PANEL_GONE_S = 10.0  # a panel that died is back sooner; a run without one for so long is over
RESERVE_S = 5.0  # of a deadline: for the process that asks to start, and to say what it was that it waited for


@dataclass(frozen=True)
class RunAddress:
    run: str
    address: str  # HOST:PORT of the cluster's control store
    namespace: str
    folder: Path | None = field(default=None, compare=False)  # None where the cluster was named instead


def named_folder(run: str | Path | None, *files: str) -> Path:
    """The folder of a run that is named by its folder, or by its name below `runs`; the latest one if `run` is None.
    One of `files`, by default the configuration, shows that a folder is that of a run."""
    named, files = str(run or LATEST), files or (CONFIG_FILE,)
    for folder in (Path(named), RUNS / named):
        if any((folder / file).is_file() for file in files):
            return folder.resolve() if folder.is_symlink() else folder  # `latest` moves
    folders = (path.parent for file in files for path in RUNS.glob(f"*/{file}") if not path.parent.is_symlink())
    names = [folder.name for folder in sorted(set(folders), key=lambda folder: -folder.stat().st_mtime)]
    names = get_close_matches(Path(named).name, names, cutoff=0.5) or names[:NUM_SHOWN_RUNS]
    there = f"; {RUNS} has {', '.join(names)}" if names else f", from the folder that holds {RUNS}"
    raise PreflightError(
        f"there is no run in {named} or {RUNS / named}: give the run's FOLDER, or its NAME below {RUNS}{there}"
    )


def config_to_go_on(run: str, overrides: Sequence[str]) -> RunConfig:
    """Returns the configuration of a run with overrides of single keys, to go on from its newest checkpoint where it
    lies now. `num_steps=+N` is N more than the run had."""
    folder = named_folder(run).resolve()
    config = load_resolved(folder / CONFIG_FILE)
    words = [MORE_STEPS.sub(lambda more: f"num_steps={config.num_steps + int(more[1])}", word) for word in overrides]
    place = {"resume": "auto", "folder": folder.parent, "name": folder.name}
    named = {word.partition("=")[0] for word in words}
    words += [f"{key}={value}" for key, value in place.items() if key not in named]
    wanted, done = load_resolved(folder / CONFIG_FILE, words), _ended_at(folder)
    if wanted.num_steps <= done:
        raise PreflightError(f"run {folder.name} has trained its {done} steps: add num_steps=+10, say, to go on")
    return wanted


def _ended_at(folder: Path) -> int:
    """Returns the number of steps of a completed run, 0 of any other run."""
    try:
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        return int(summary["version"]) if summary["status"] == "done" else 0
    except (OSError, ValueError, KeyError):
        return 0


def find_run(name: str | None, folder: Path | None, address: str | None) -> RunAddress:
    """Finds a run: by `name` on the cluster at `address`, else by `folder`, else the latest one."""
    if address is not None:
        if name is None:
            raise PreflightError("--address needs the run's NAME as well: several runs may share one cluster")
        return RunAddress(name, address, name)
    run_folder = named_folder(folder or name, CONFIG_FILE, RECORD_FILE, SUMMARY)
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


# Leftovers of dead runs: processes and Ray session folders on this machine, placement groups on a cluster.
#
# A process belongs to a run if it carries the run's mark in its environment, wherever it has gone since, or if it
# writes into the run's Ray session and hides its environment; the run is dead if the driver that the mark names is.
# Each leftover has an id that names this one thing and nothing that comes after it.

FREE_WITHIN_S = 10.0  # a leftover that does not heed SIGTERM is killed then
SESSION_FOLDER = re.compile(r"session_\d{4}-\d\d-\d\d_[\d_-]+")
GROUP_NAME = re.compile(r"(?P<run>[^/]+)/(?P<worker>[a-z]+/\d+)/[0-9a-f]{8}")  # see cluster/runtime/placement_groups.py
CLUSTER_TIMEOUT_S = 60.0
SHORT = 12  # characters of an id made at random that still name one run


class NotFreedError(MobulaError):
    """A leftover is still there."""


@dataclass(frozen=True)
class Leftover:
    """A process, session folder or placement group of a dead run, and the function that frees it."""

    id: str
    run: str
    what: str
    free: Callable[[float], None]  # gets the seconds to do it in good order; raises a MobulaError


def find_leftovers(*, runs: Path = RUNS, address: str | None = None) -> list[Leftover]:
    """Returns the leftovers of dead runs on this machine, and on the cluster at `address` if given."""
    groups = _placement_groups(address) if address is not None else ()
    records = _dead_records(runs)
    return [*_processes(records), *_sessions(records), *groups]


def free(ids: Sequence[str], leftovers: Sequence[Leftover], timeout_s: float) -> Iterator[tuple[Leftover, str]]:
    """Frees the leftovers with these ids; yields each with the reason of a failure, or an empty text."""
    by_id = {leftover.id: leftover for leftover in leftovers}
    unknown = [name for name in ids if name not in by_id]
    if unknown:
        raise PreflightError(
            f"{', '.join(unknown)}: no leftover has this id (any more); `mobula doctor --leftovers` lists them"
        )
    for name in ids:
        try:
            by_id[name].free(timeout_s)
        except MobulaError as error:
            yield by_id[name], str(error)
        else:
            yield by_id[name], ""


def show_leftovers(ids: Sequence[str], address: str | None, console: Console) -> int:
    """End the leftovers of these ids, or list all of them; returns how many could not be ended."""
    num_left = 0
    dead = find_leftovers(address=address)
    if not ids:
        for leftover in dead:
            console.print(leftover.id, style="bold", end="  ")
            console.print(f"run {leftover.run}: {leftover.what}")
        console.print("End one with --free ID." if dead else "Dead runs left nothing on this machine.")
    for leftover, refusal in free(ids, dead, FREE_WITHIN_S):
        num_left += bool(refusal)
        console.print(f"{leftover.id}: {refusal or 'freed'}")
    return num_left


def _processes(records: Sequence[RunRecord]) -> Iterator[Leftover]:
    hidden = ((process, record.mark) for record in records for process in _holders(record))
    for marked, mark in (*_orphans(), *hidden):
        process_id = f"process-{marked.process.pid}-{marked.process.start_ticks}"
        yield Leftover(
            process_id, mark.run_id.rpartition("/")[0], marked.command, partial(_end_process, marked.process)
        )


def _orphans() -> Iterator[tuple[MarkedProcess, RunMark]]:
    for marked in marked_processes(RUN_VARIABLE):
        try:
            mark = RunMark.of(marked.environment)
        except (KeyError, ValueError):
            continue  # not written by us
        if _is_dead(mark):
            yield marked, mark


def _end_process(process: ProcessId, timeout_s: float) -> None:
    try:
        is_gone = end(process, timeout_s)
    except PermissionError as error:
        raise NotFreedError(f"process {process.pid} is another user's: ask them, or do it as root") from error
    if not is_gone:
        raise NotFreedError(f"process {process.pid} outlived SIGKILL: it is stuck in the kernel")


def _holders(record: RunRecord) -> list[MarkedProcess]:
    return [] if record.session_folder is None else list(holders(record.session_folder))


def _dead_records(runs: Path) -> list[RunRecord]:
    """Dead drivers by their records: in the session folders of private clusters, and in run folders."""
    records: set[RunRecord] = set()
    named = [os.environ[variable] for variable in ("RAY_TMPDIR", "TMPDIR") if variable in os.environ]
    ray_folder = Path(*named[:1] or ["/tmp"]) / "ray"
    for path in (*ray_folder.glob(f"session_*/{SESSION_FILE}"), *runs.glob(f"*/{RECORD_FILE}")):
        try:
            records.add(RunRecord.read(path))
        except (OSError, ValueError):
            continue  # not written by us, or gone meanwhile
    return sorted((record for record in records if _is_dead(record.mark)), key=lambda record: record.mark.run_id)


def _sessions(records: Sequence[RunRecord]) -> Iterator[Leftover]:
    for record in records:
        folder = record.session_folder
        path = str(folder) if folder is not None and folder.is_dir() else str(record.run_folder / RECORD_FILE)
        session_id = f"session-{record.mark.run_id.rpartition('/')[2][:SHORT]}"
        yield Leftover(session_id, record.run, path, partial(_remove_session, record))


def _remove_session(record: RunRecord, timeout_s: float) -> None:
    using = [*(marked for marked, mark in _orphans() if mark == record.mark), *_holders(record)]
    alive = [str(marked.process.pid) for marked in using]
    if alive:
        raise NotFreedError(f"it is still used by processes {', '.join(alive)}: free these first")
    folder = record.session_folder
    if folder is not None and folder.is_dir():
        if not SESSION_FOLDER.fullmatch(folder.name) or not (folder / "logs").is_dir():
            raise NotFreedError(f"{folder} does not look like a Ray session folder: remove it yourself if it is one")
        shutil.rmtree(folder)
    for path in record.paths:
        if path.is_file() and RunRecord.read(path) == record:  # not that of the same run, gone on with
            path.unlink()


def _placement_groups(address: str) -> Iterator[Leftover]:
    knock(address, "the placement groups of dead runs cannot be listed")
    what = f"the cluster at {address} to list its placement groups"
    for group_id, name in in_side_process(_dead_groups, CLUSTER_TIMEOUT_S, what, address):
        matched = GROUP_NAME.fullmatch(name)
        if matched is not None:  # else it belongs to another run
            what = f"what was reserved for {matched['worker']}"
            yield Leftover(f"group-{group_id}", matched["run"], what, partial(_remove_group, address, group_id))


def _remove_group(address: str, group_id: str, timeout_s: float) -> None:
    what = f"the cluster at {address} to remove placement group {group_id}"
    in_side_process(_remove_group_there, CLUSTER_TIMEOUT_S, what, address, group_id)


def _dead_groups(address: str) -> list[tuple[str, str]]:
    with connected(address):
        from mobula.cluster.runtime.placement_groups import groups_of_dead_drivers

        return groups_of_dead_drivers()


def _remove_group_there(address: str, group_id: str) -> None:
    with connected(address):
        from mobula.cluster.runtime.placement_groups import remove_group

        remove_group(group_id)


def _is_dead(mark: RunMark) -> bool:
    """Whether the driver belonged to this machine and is gone; drivers of other machines count as alive."""
    return mark.driver.is_here and not mark.driver.is_alive
