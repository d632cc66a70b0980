"""Digests of the files of a run folder, as its records have them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mobula.cluster.audit.chain import AUDIT_FILE, HEAD_FILE

if TYPE_CHECKING:
    from hashlib import _Hash

CHECKPOINTS, TRAJECTORIES, JOURNAL, LOGS, RUN_LOG = "checkpoints", "trajectories", "journal", "logs", "run.log"
CHUNK_BYTES = 1 << 20
# No record has these: the chain itself, files of a process that runs, and files that other commands write, or write
# again, after the run.
UNCOVERED_FOLDERS = ("replay", "export", "mlruns", "trackio", "wandb", "diagnosis")
UNCOVERED_FILES = (AUDIT_FILE, HEAD_FILE, "run.lock", "cluster.json", "scale.json", "report.html", "diagnosis.json")
FORMERLY_UNCOVERED = (LOGS, RUN_LOG, "tensorboard", "traces")  # by a last record without `covers_all`


def file_sha256(path: Path, num_bytes: int | None = None) -> str:
    """Returns the digest of a file, or of its first bytes."""
    with path.open("rb") as file:
        if num_bytes is None:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        while num_bytes > 0 and (chunk := file.read(min(num_bytes, CHUNK_BYTES))):
            digest.update(chunk)
            num_bytes -= len(chunk)
        return digest.hexdigest()


def text_sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def is_growing(name: str) -> bool:
    """Whether processes may append to the file after the last record, so that this has a digest of its first bytes."""
    return name == RUN_LOG or name.startswith(f"{LOGS}/")


def is_segment(name: str) -> bool:
    return name.startswith(f"{JOURNAL}/")


def files_below(folder: Path) -> Iterator[str]:
    """Yields the path of every file, in order. Links are not followed: one to a folder is a file here."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            yield from (f"{entry.name}/{name}" for name in files_below(Path(entry.path)))
        else:
            yield entry.name


def is_uncovered(name: str) -> bool:
    """Whether no record of this version has the file, checkpoints and trajectory log aside."""
    return name in UNCOVERED_FILES or name.partition("/")[0] in UNCOVERED_FOLDERS


def recorded_files(folder: Path) -> Iterator[Path]:
    """Yields the files that a run's last record has digests of. Checkpoints and trajectory log have own records."""
    for name in files_below(folder):
        path = folder / name
        has_record = name.partition("/")[0] in (CHECKPOINTS, TRAJECTORIES)
        if not has_record and not is_uncovered(name) and path.is_file() and not path.is_symlink():
            yield path


def digests_below(folder: Path) -> Mapping[str, tuple[int, str]]:
    """Returns path -> bytes and sha256 of `recorded_files`."""
    sizes = {path: path.stat().st_size for path in recorded_files(folder)}
    return {str(path.relative_to(folder)): (size, file_sha256(path, size)) for path, size in sizes.items()}


class JournalDigests:
    """Digests of the journal's segments, which only grow: each byte is read once."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the run folder."""
        self._folder = folder
        self._read: dict[str, tuple[int, _Hash]] = {}

    def now(self) -> dict[str, tuple[int, str]]:
        """Returns path -> bytes and sha256 of every segment; one in progress may end within a record."""
        read, self._read = self._read, {}
        for path in sorted((self._folder / JOURNAL).glob("*.arrows")):
            num_bytes, digest = read.get(path.name, (0, hashlib.sha256()))
            with path.open("rb") as file:
                file.seek(num_bytes)
                while chunk := file.read(CHUNK_BYTES):
                    digest.update(chunk)
                    num_bytes += len(chunk)
            self._read[path.name] = (num_bytes, digest)
        return {f"{JOURNAL}/{name}": (num, digest.hexdigest()) for name, (num, digest) in self._read.items()}
