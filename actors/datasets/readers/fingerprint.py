"""A fingerprint of files of rows, by which a run knows whether its data are those that it began with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

WHOLE_BYTES = 1 << 20  # a file of at most this size is read whole
NUM_BLOCKS, BLOCK_BYTES = 16, 1 << 16  # of a larger one, at equal distances, the first and the last bytes among them


def fingerprint_of(files: Iterable[Path]) -> str:
    """A hash of names, sizes and content; at most 1 MiB of each file is read. Media files do not count.

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
