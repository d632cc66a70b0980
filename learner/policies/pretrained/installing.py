"""install_checkpoint: writes a checkpoint folder atomically."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory


def install_checkpoint(folder: Path, write: Callable[[Path], object]) -> Path:
    """Calls `write` with a new folder, renames that folder to `folder` and returns `folder`.

    A folder with a checkpoint is not changed. If several processes write at once, the first one wins.
    """
    if _holds_checkpoint(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as staging:
        written = Path(staging) / "checkpoint"
        written.mkdir()
        write(written)
        try:
            written.rename(folder)
        except OSError:
            if not _holds_checkpoint(folder):
                raise
    return folder


def _holds_checkpoint(folder: Path) -> bool:
    return (folder / "config.json").is_file()
