"""Digests of the files of a run folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from mobula.cluster.audit.chain import AUDIT_FILE, HEAD_FILE

# Checkpoints have manifests of their own, and the trajectory log records of its own. The others are written after the
# end of a run, by other commands, or say nothing that other files do not say.
UNRECORDED_FOLDERS = (
    "checkpoints",
    "trajectories",
    "logs",
    "tensorboard",
    "traces",
    "replay",
    "export",
    "mlruns",
    "trackio",
    "wandb",
    "diagnosis",
)
UNRECORDED_FILES = (
    AUDIT_FILE,
    HEAD_FILE,
    "run.log",
    "report.html",
    "diagnosis.json",
    "cluster.json",
    "scale.json",
    "run.lock",
)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def text_sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def digests_below(folder: Path) -> Mapping[str, tuple[int, str]]:
    """Returns relative path -> bytes and sha256 of every recorded file of a run folder."""
    return {str(path.relative_to(folder)): (path.stat().st_size, file_sha256(path)) for path in recorded_files(folder)}


def recorded_files(folder: Path) -> Iterator[Path]:
    """Yields the files that a run's last record has digests of, in order of their names."""
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        is_recorded = parts[0] not in UNRECORDED_FOLDERS and str(path.relative_to(folder)) not in UNRECORDED_FILES
        if is_recorded and path.is_file() and not parts[-1].startswith("."):
            yield path
