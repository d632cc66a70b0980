"""Writes whole files and folders atomically, syncs them to disk, appends to logs, and reads files by their digest."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, BinaryIO

CHUNK_BYTES = 1 << 20


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a draft that replaces `path` when the body ends, and creates its folder if needed. The draft is synced
    before the rename: a file with the final name is complete even after a power failure. An error removes the draft."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with draft.open("xb") as file:
            yield file
            flush(file)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, text: str) -> None:
    """Replaces the content of `path` as `replacing` does."""
    with replacing(path) as file:
        file.write(text.encode())


def install_folder(folder: Path, is_installed: Callable[[], bool], build: Callable[[Path], object]) -> Path:
    """Calls `build` with an empty folder, renames that to `folder` and returns `folder`.

    Returns at once if `is_installed` is true. If several processes build at once, the folder of the first one stays.
    """
    if is_installed():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as staging:
        built = Path(staging) / "built"
        built.mkdir()
        build(built)
        try:
            built.rename(folder)
        except OSError:
            if not is_installed():
                raise
    return folder


def flush(file: IO[bytes] | IO[str]) -> None:
    """Waits until the content of an open file is on disk."""
    file.flush()
    os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Waits until a folder and everything below it are on disk."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def append_line(path: Path, line: str, *, is_synced: bool = False) -> None:
    """Appends `line` and a line feed; removes a last line that a killed process left incomplete. `is_synced`: returns
    once the line is on disk."""
    with path.open("a+b") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        file.write(f"{line}\n".encode())
        if is_synced:
            flush(file)


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


def read_verified(path: Path, sha256: str, index: str) -> bytes:
    """Returns the content of `path`. `index` names the file that lists its digest, for the error message."""
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != sha256:
        raise ValueError(
            f"{path} has the SHA-256 {digest}, and {sha256} was written: put the file of the run back, or remove its "
            f"row from {index}"
        )
    return content
