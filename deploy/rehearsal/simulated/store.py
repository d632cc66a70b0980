"""StoreLedger: the bytes that live groups and media take in the object store of each node."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any


class StoreLedger:
    """Counts the bytes of an object from `hold` until Python frees it, as the object store counts references."""

    def __init__(self) -> None:
        self.used: Counter[str] = Counter()  # node -> bytes
        self.peak: Counter[str] = Counter()
        self._held: set[int] = set()  # ids of objects

    def hold(self, thing: Any, node_id: str, num_bytes: int) -> None:
        """Counts `thing` once, however often it is held."""
        if id(thing) in self._held:
            return
        self._held.add(id(thing))
        self.used[node_id] += num_bytes
        self.peak[node_id] = max(self.peak[node_id], self.used[node_id])
        weakref.finalize(thing, self._free, id(thing), node_id, num_bytes).atexit = False

    def _free(self, held: int, node_id: str, num_bytes: int) -> None:
        self._held.discard(held)
        self.used[node_id] -= num_bytes
