"""A fingerprint of data files, to detect on a resume that the data have changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

WHOLE_BYTES = 1 << 20  # files up to this size are hashed completely
NUM_BLOCKS, BLOCK_BYTES = 16, 1 << 16  # of larger files: equidistant blocks, with the first and the last bytes


def fingerprint_of(files: Iterable[Path]) -> str:
    """A hash of names, sizes and content; reads at most 1 MiB of each file. Media files are not included.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as content:
            if size <= WHOLE_BYTES:
                digest.update(content.read())
                continue
            for block in range(NUM_BLOCKS):
                content.seek((size - BLOCK_BYTES) * block // (NUM_BLOCKS - 1))
                digest.update(content.read(BLOCK_BYTES))
    return digest.hexdigest()[:16]
