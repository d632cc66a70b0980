"""Checkpoints: the driver's side of atomic run checkpoints. A checkpoint is complete or does not exist.

checkpoints/step-000040/learner/...     files of the learner ranks: model, optimizer, random states
checkpoints/step-000040/state.json      version, identity of the run, and the state of each resumable part
checkpoints/step-000040/manifest.json   size and sha256 of every other file; written last
checkpoints/.tmp-40-<token>/            a checkpoint in progress; renamed when every byte is on disk
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mobula.cluster.errors import CheckpointError, MobulaError, PreflightError
from mobula.cluster.files import file_sha256, sync, sync_folder
from mobula.cluster.replay.run_identity import DATA_FILES, DATA_PATH, same_identity
from mobula.cluster.workers.supervisor import background_tasks
from mobula.configs.schema.run import Resume

_logger = logging.getLogger(__name__)

_STEP = re.compile(r"step-(\d+)")
_LEFTOVER = re.compile(r"\.(tmp|old)-.+")
FINISHED = "the trained policy"
# Text of errors for a full disk: writers in Rust and C++ do not raise OSError.
_FULL_DISK = ("No space left on device", "Disk quota exceeded", "enforce fail at inline_container")
MANIFEST_FILE = "manifest.json"
STATE_FILE, _LEARNER = "state.json", "learner"


class Durable(Protocol):
    """Saves and loads the state of a learner group. Every rank and the driver share the file system of `folder`."""

    async def save(self, folder: Path) -> None:
        """Copies the state and writes it to `folder` in the background."""

    async def finish_save(self) -> bool:
        """Waits until the last copy is on disk. Returns False if the copy was lost with a rank."""

    async def load(self, folder: Path) -> int:
        """Restores the state written by `save` and returns its version."""


class Resumable(Protocol):
    """A part of the driver with state in checkpoints."""

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, as JSON."""

    def restore(self, version: int, state: dict[str, Any]) -> None: ...


class Recovery:
    """Repeats the steps between a checkpoint and the end of the run (`mobula.cluster.recovery.resume`). This base
    repeats none: later steps are sampled and trained again."""

    async def begin(self) -> None:
        """Called at the start of a new run."""

    async def recover(self, version: int) -> int:
        """Called once learner and parts are restored from the checkpoint of `version`. Returns the version reached."""
        return version

    async def saved(self, version: int) -> None:
        """Called when the checkpoint of `version` is complete."""


@dataclass(frozen=True)
class CheckpointSchedule:
    """A checkpoint is due after every `interval_steps` (0: never) and after the last step. The newest `keep` are kept.
    Version 0 is always kept: it is the reference policy of the run and holds the warm start."""

    interval_steps: int
    total_steps: int
    keep: int

    def is_due(self, version: int) -> bool:
        is_between = self.interval_steps > 0 and version % self.interval_steps == 0
        return is_between or version == self.total_steps


@dataclass(eq=False)
class Checkpoints:
    """Saves and resumes one run."""

    folder: Path
    _: KW_ONLY
    learner: Durable
    parts: Mapping[str, Resumable]
    prepare: Callable[[], Awaitable[None]]  # makes version 0 of a new run (the warm start)
    finish: Callable[[], Awaitable[None]]  # runs after the last checkpoint (the export of the trained policy)
    identity: Mapping[str, Any]  # `run_identity(config)`
    resume_mode: Resume
    schedule: CheckpointSchedule
    recovery: Recovery = field(default_factory=Recovery)
    before_resume: Callable[[], Awaitable[None]] | None = None  # before a checkpoint is loaded or version 0 is made
    on_accepted: Callable[[], None] = lambda: None  # once a checkpoint is loaded, or before version 0 is made
    # chooses checkpoints that are kept in addition to the newest, from the versions of all complete ones
    kept: Callable[[Sequence[int]], Collection[int]] = lambda versions: ()

    def __post_init__(self) -> None:
        self._tasks: asyncio.TaskGroup | None = None
        self._running: asyncio.Task[Path | None] | None = None
        self._is_overdue = False
        self._newest: int | None = None  # version of the newest complete checkpoint

    async def resume(self) -> int:
        """Restores the run and returns its version. The newest complete checkpoint is loaded and the steps of the
        journal are repeated. Without a checkpoint version 0 is prepared and saved."""
        latest = await asyncio.to_thread(find_resumable, self.folder, self.resume_mode, self.identity)
        await asyncio.to_thread(_remove_leftovers, self.folder)
        if self.before_resume is not None:
            await self.before_resume()
        if latest is None:
            self._accept()
            await self.recovery.begin()
            with self._explained("version 0"):
                await self.prepare()
            await self.save(0)
            return 0
        state = json.loads((latest / STATE_FILE).read_text())
        version = await self._load(latest)
        assert version == state["version"], f"the learner loaded version {version} from {latest}"
        # Learner first: its version is checked before any part of the driver is changed.
        self._newest = version
        for name in self.parts.keys() & state["parts"].keys():  # a part that was off starts from its initial state
            self.parts[name].restore(version, state["parts"][name])
        self._accept()
        _logger.info("resumed from %s", latest)
        reached = await self.recovery.recover(version)
        if reached > version:
            await self.maybe_save(reached)  # the run may have been killed before this checkpoint
        elif reached == self.schedule.total_steps:
            with self._explained(FINISHED):
                await self.finish()  # repeated: the export records no progress
        return reached

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Writes checkpoints in the background while the body runs. Waits for a write in progress on exit."""
        async with background_tasks() as self._tasks:
            try:
                yield
                await self._finish_write()
            finally:
                self._tasks = None
                if self._running is not None:  # also after an error of the body: the copy was taken before the error
                    await asyncio.wait({self._running})

    async def maybe_save(self, version: int) -> None:
        """Saves `version` if a checkpoint is due; after the last version, calls `finish`.

        Inside `writing` it returns once the state is copied; one checkpoint is written at a time. For the last version
        it returns once the checkpoint is written. If a copy is lost with a learner rank, the next step is saved.
        """
        is_last = version == self.schedule.total_steps
        await self._finish_write(is_waiting=is_last or self.schedule.is_due(version))
        if self.schedule.is_due(version) or self._is_overdue:
            if is_last or self._tasks is None:
                await self.save(version)
            else:
                draft, state = await self._copy(version)
                self._running = self._tasks.create_task(self._write(draft, state), name=f"write step {version}")
        if is_last:
            with self._explained(FINISHED):
                await self.finish()

    async def ensure_saved(self, version: int) -> None:
        """Saves `version` before a stop, unless its checkpoint exists."""
        await self._finish_write()
        if self._newest == version:
            _logger.info("step %d already has a checkpoint", version)
        else:
            await self.save(version)

    async def save(self, version: int) -> Path:
        """Writes a checkpoint and removes the oldest ones beyond `keep`."""
        while True:
            path = await self._write(*await self._copy(version))
            if path is not None:
                return path

    async def _finish_write(self, *, is_waiting: bool = True) -> None:
        if self._running is not None and (is_waiting or self._running.done()):
            self._is_overdue = await self._running is None
            self._running = None

    async def _copy(self, version: int) -> tuple[Path, Mapping[str, Any]]:
        """Returns the draft folder, to which the learner writes, and a copy of the driver's state."""
        state = {
            "version": version,
            "identity": self.identity,
            "parts": {name: part.state() for name, part in self.parts.items()},
        }
        draft = self.folder / f".tmp-{version}-{secrets.token_hex(4)}"
        with self._explained(f"the checkpoint of step {version}", draft):
            (draft / _LEARNER).mkdir(parents=True)
            await self.learner.save(draft / _LEARNER)
        return draft, state

    async def _write(self, draft: Path, state: Mapping[str, Any]) -> Path | None:
        """Completes a checkpoint and returns its path; None if the learner's copy was lost."""
        version = state["version"]
        with self._explained(f"the checkpoint of step {version}", draft):
            if not await self.learner.finish_save():
                _logger.warning("the checkpoint of step %d was lost with a learner rank and is written again", version)
                await asyncio.to_thread(shutil.rmtree, draft)
                return None
            path = await asyncio.to_thread(self._complete, draft, version, state)
        self._is_overdue, self._newest = False, version
        # After the rename: the journal may drop only steps that a complete checkpoint contains.
        await self.recovery.saved(version)
        _logger.info("checkpoint of step %d: %s", version, path)
        return path

    async def _load(self, path: Path) -> int:
        try:
            return await self.learner.load(path / _LEARNER)
        except MobulaError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[-1]}"
            raise CheckpointError(
                f"{path} cannot be loaded with this configuration ({reason}): set policy and learner as in config.yaml "
                "of the run folder, or name=... for a new run"
            ) from error

    def _accept(self) -> None:
        with self._explained("the configuration"):
            self.on_accepted()

    @contextmanager
    def _explained(self, what: str, draft: Path | None = None) -> Iterator[None]:
        """Raises an error with the reason if `what` cannot be written. Removes the draft of a failed checkpoint, which
        may have filled the disk."""
        try:
            yield
        except Exception as error:
            is_os_error = isinstance(error, OSError)
            is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            is_full = is_full or any(text in str(error) for text in _FULL_DISK)
            if not (is_full or (is_os_error and draft is not None)):
                raise
            if draft is not None:
                shutil.rmtree(draft, ignore_errors=True)
            reason = str(error) if is_os_error else f"no space left ({str(error).splitlines()[-1]})"
            raise CheckpointError(
                f"{what} could not be written below {self.folder}: {reason}; free disk space or set folder=... to "
                "another disk, then go on with resume=auto"
            ) from error

    def _complete(self, draft: Path, version: int, state: Mapping[str, Any]) -> Path:
        (draft / STATE_FILE).write_text(json.dumps(state, indent=1))
        _write_manifest(draft)
        path = checkpoint_folder(self.folder, version)
        if path.exists():
            _remove(path)  # damaged: a complete checkpoint would have been resumed
        os.rename(draft, path)
        sync(self.folder)
        complete = [old for old in _newest_first(self.folder) if fault_of(old, with_hashes=False) is None]
        kept = self.kept([_version(old) for old in complete])
        for old in complete[self.schedule.keep :]:
            if _version(old) != 0 and _version(old) not in kept:
                _remove(old)
        return path


def find_resumable(folder: Path, resume: Resume, identity: Mapping[str, Any]) -> Path | None:
    """Returns the checkpoint from which a run with this configuration resumes; None for a new run. Needs no role."""
    latest, faults = _newest_readable(folder)
    if latest is None and not faults:
        return None
    if resume is Resume.NEVER:
        raise PreflightError(
            f"{folder.parent} already holds step {versions_in(folder)[-1]}: "
            "set resume=auto to go on, or name=... for a new run"
        )
    reasons = "; ".join(f"{path.name}: {fault}" for path, fault in faults.items())
    if latest is None:
        raise PreflightError(
            f"{folder} has checkpoints and none can be read ({reasons}), so nothing is overwritten: restore the files "
            f"of one, or set name=... for a new run, or remove {folder} to begin this run again"
        )
    if faults:
        _logger.warning("%s is the newest checkpoint that can be read (%s)", latest, reasons)
    refuse_other_run(latest, identity)
    return latest


def refuse_other_run(checkpoint: Path, identity: Mapping[str, Any]) -> None:
    """Compares `identity` with the identity in a checkpoint. Keys that an older version did not save are ignored."""
    saved = json.loads((checkpoint / STATE_FILE).read_text())["identity"]
    then, now = same_identity(saved), same_identity(identity)
    changed = [key for key in sorted(then.keys() & now.keys()) if then[key] != now[key]]
    if DATA_PATH in changed and (files := then.get(DATA_FILES)) and files == now.get(DATA_FILES):
        _logger.info("the data moved from %s to %s", saved[DATA_PATH], identity[DATA_PATH])
        changed.remove(DATA_PATH)
    if changed:
        was = ", ".join(f"{key}={_shown(saved[key])} (now {_shown(identity[key])})" for key in changed)
        raise PreflightError(
            f"{checkpoint} was saved with {was}: set these keys back to resume, or name=... for a new run"
        )


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def latest_complete(folder: Path, accepts: Callable[[int], bool] = lambda version: True) -> Path | None:
    """Returns the newest complete checkpoint of an accepted version, its hashes verified; logs a warning for each
    damaged one."""
    latest, faults = _newest_readable(folder, accepts)
    for path, fault in faults.items():
        _logger.warning("%s is skipped: %s", path, fault)
    return latest


def _newest_readable(
    folder: Path, accepts: Callable[[int], bool] = lambda version: True
) -> tuple[Path | None, dict[Path, str]]:
    """Returns the newest complete checkpoint of an accepted version, and the fault of each newer one."""
    faults: dict[Path, str] = {}
    for path in (path for path in _newest_first(folder) if accepts(_version(path))):
        fault = fault_of(path, with_hashes=True)
        if fault is None:
            return path, faults
        faults[path] = fault
    return None, faults


def newest_learner_state(
    folder: Path, accepts: Callable[[int], bool] = lambda version: True
) -> tuple[int, Path] | None:
    """Returns version and learner folder of the newest complete checkpoint of an accepted version; None if there is
    none."""
    latest = latest_complete(folder, accepts)
    return None if latest is None else (_version(latest), latest / _LEARNER)


def checkpoint_folder(folder: Path, version: int) -> Path:
    """Returns the folder of the checkpoint of `version`, which may not exist."""
    return folder / f"step-{version:06d}"


def versions_in(folder: Path) -> list[int]:
    """Returns the versions of all checkpoints below `folder`, complete or not, oldest first."""
    return [_version(path) for path in reversed(_newest_first(folder))]


def learner_state_of(folder: Path, version: int) -> Path:
    """Returns the learner folder of the checkpoint of `version`."""
    path = checkpoint_folder(folder, version)
    if not path.is_dir():
        steps = ", ".join(map(str, versions_in(folder)))
        raise PreflightError(f"{folder} has no checkpoint of step {version}; it has these steps: {steps or 'none'}")
    fault = fault_of(path, with_hashes=True)
    if fault is not None:
        raise PreflightError(f"{path} is not complete, {fault}: use another step")
    return path / _LEARNER


def _newest_first(folder: Path) -> list[Path]:
    checkpoints = [path for path in folder.iterdir() if _STEP.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(checkpoints, key=_version, reverse=True)


def _version(path: Path) -> int:
    match = _STEP.fullmatch(path.name)
    assert match, f"{path} is no checkpoint folder"
    return int(match[1])


def fault_of(path: Path, *, with_hashes: bool = True) -> str | None:
    """Returns why a checkpoint cannot be read; None if it is complete."""
    name = MANIFEST_FILE
    try:
        if not (path / name).is_file():
            return f"it has no {name}"
        files = json.loads((path / name).read_text())["files"]
        entries = {name: (entry["num_bytes"], entry["sha256"]) for name, entry in files.items()}
        for name, (num_bytes, sha256) in entries.items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != num_bytes:
                return f"{name} has {file.stat().st_size} bytes instead of {num_bytes}"
            if with_hashes and file_sha256(file) != sha256:
                return f"{name} was changed after it was written (sha256)"
        name = STATE_FILE
        state = json.loads((path / name).read_text())
        if state["version"] != _version(path):
            return f"its {name} is of version {state['version']}"
        if not (isinstance(state["identity"], dict) and isinstance(state["parts"], dict)):
            return f"its {name} cannot be read"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError):  # of another program, or of damaged text
        return f"its {name} cannot be read"
    return None


def _write_manifest(folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = {str(f.relative_to(folder)): {"num_bytes": f.stat().st_size, "sha256": file_sha256(f)} for f in files}
    (folder / MANIFEST_FILE).write_text(json.dumps({"files": entries}, indent=1))
    sync_folder(folder)


def _remove(path: Path) -> None:
    """Renames a checkpoint and removes it, so that a kill in between leaves no partial checkpoint under its name."""
    doomed = path.with_name(f".old-{path.name}-{secrets.token_hex(4)}")
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def _remove_leftovers(folder: Path) -> None:
    leftovers = [path for path in folder.iterdir() if _LEFTOVER.fullmatch(path.name)] if folder.is_dir() else []
    for path in leftovers:
        _logger.warning("removed %s, a leftover of a save that was killed", path)
        shutil.rmtree(path)
