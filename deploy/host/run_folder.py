"""The folder of a run: proved to be writable before anything starts, made once a start is accepted.

A start that is refused leaves neither a folder nor a `latest` that points to it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

from cluster.errors import PreflightError
from cluster.metrics.report.run_folder import CONFIG_FILE
from configs.load import dump_config
from configs.schema import RunConfig

CHECKPOINTS_FOLDER = "checkpoints"  # of the run folder


def check_run_folder(config: RunConfig) -> None:
    """Prove that the run folder can be written; nothing is left behind.

    Raises:
        PreflightError: it cannot be written.
    """
    folder = config.run_folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    try:
        with TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise _unwritable(config, error) from error


@contextmanager
def run_folder(config: RunConfig) -> Iterator[None]:
    """Make the run folder and point `latest` at it; undone if the body refuses the start and the folder is new.

    Raises:
        PreflightError: it cannot be written.
    """
    latest = config.folder / "latest"
    before = os.readlink(latest) if latest.is_symlink() else None
    made = [path for path in (config.run_folder, config.folder) if not path.exists()]
    try:
        make_run_folder(config)
        yield
    except PreflightError:
        has_begun = (config.run_folder / CHECKPOINTS_FOLDER).exists()
        if config.run_folder in made and not has_begun:
            _undo(config, before, made)
        raise


def make_run_folder(config: RunConfig) -> None:
    """Create the run folder, write the configuration into it, and point `latest` at it.

    Raises:
        PreflightError: it cannot be written.
    """
    folder = config.run_folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG_FILE).write_text(dump_config(config), encoding="utf-8")
        _point_latest_at(config, folder.name)
    except OSError as error:
        raise _unwritable(config, error) from error


def _point_latest_at(config: RunConfig, name: str) -> None:
    link = config.folder / f".latest-{os.getpid()}"
    link.symlink_to(name, target_is_directory=True)
    try:
        link.replace(config.folder / "latest")
    except OSError:
        link.unlink()
        raise


def _undo(config: RunConfig, latest: str | None, made: list[Path]) -> None:
    shutil.rmtree(config.run_folder, ignore_errors=True)
    link = config.folder / "latest"
    if latest is not None:
        _point_latest_at(config, latest)
    elif link.is_symlink():
        link.unlink()
    if config.folder in made:
        with suppress(OSError):  # another run has a folder in it by now
            config.folder.rmdir()


def _unwritable(config: RunConfig, error: OSError) -> PreflightError:
    return PreflightError(
        f"the run folder {config.run_folder} cannot be written ({error}): set folder or name to another"
    )
