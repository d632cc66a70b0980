"""Files of a run, written in one step, and read only if they are what was written."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` with `text` in one step; its folder is made if it is missing. If this fails, nothing is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def read_verified(path: Path, sha256: str, index: str) -> bytes:
    """The content of `path`, whose digest the file `index` names.

    Raises:
        ValueError: it differs from what was written.
    """
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != sha256:
        raise ValueError(
            f"{path} has the SHA-256 {digest}, and {sha256} was written: put the file of the run back, or remove its "
            f"row from {index}"
        )
    return content
