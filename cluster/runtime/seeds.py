"""Derives seeds from a seed and a name: equal for equal names, unrelated for different ones."""

from __future__ import annotations

import hashlib

SEED_BITS = 31


def derived_seed(seed: int, name: str) -> int:
    """A pure function of both arguments: sha256 cut to SEED_BITS. A sampler that adds the sibling's number to it stays
    below 2^32."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
