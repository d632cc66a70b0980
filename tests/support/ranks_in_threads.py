"""Learner ranks as threads of one process, and an object store that counts what each of them fetches."""

from __future__ import annotations

import dataclasses
import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mobula.cluster.errors import LostObjectError, WrongGroupError
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.learner.shares import Exchange, UnplannedShareError


@dataclasses.dataclass(frozen=True)
class Stored:
    """Stands for an object reference: the value's bytes, which a fetch reads and counts."""

    content: bytes


class Store:
    """Resolves `Stored` values, and counts the bytes that each thread has fetched."""

    def __init__(self) -> None:
        self.num_bytes: dict[int, int] = {}
        self.lost: set[int] = set()  # threads whose fetches fail

    def put(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        def stored(value: Any) -> Any:
            return None if value is None else Stored(pickle.dumps(value))

        return [
            dataclasses.replace(g, group=stored(g.group), reference_logprobs=stored(g.reference_logprobs))
            for g in groups
        ]

    def fetch(self, references: Sequence[Any], *, timeout_s: float, what: str) -> list[Any]:
        rank = threading.get_ident()
        if rank in self.lost:
            raise LostObjectError(f"{what} cannot be had")
        found = [r.content for r in references if isinstance(r, Stored)]
        self.num_bytes[rank] = self.num_bytes.get(rank, 0) + sum(map(len, found))
        return [pickle.loads(r.content) if isinstance(r, Stored) else r for r in references]


class RanksInThreads:
    """Ranks as threads of this process, which meet where a process group would."""

    def __init__(self, num: int, store: Store) -> None:
        self.num = num
        self._store = store
        self._meeting = threading.Barrier(num, timeout=20)
        self._values: list[bytes] = [b""] * num
        self.num_exchanged = 0  # bytes that all ranks gave to the others

    def each(self, call: Callable[[int, Exchange], Any], unlucky: int | None = None) -> list[Any]:
        """What `call(rank, exchange)` returns for each rank, or its error; for `unlucky` every fetch fails."""

        def rank(number: int) -> Any:
            if number == unlucky:
                self._store.lost.add(threading.get_ident())
            try:
                return call(number, self._exchange(number))
            except (LostObjectError, WrongGroupError, UnplannedShareError) as error:
                return error

        with ThreadPoolExecutor(self.num) as pool:
            found = list(pool.map(rank, range(self.num)))
        self._store.lost.clear()  # a later thread may have the number of an earlier one
        return found

    def _exchange(self, rank: int) -> Exchange:
        def exchange(value: Any) -> Sequence[Any]:
            self._values[rank] = pickle.dumps(value)
            self._meeting.wait()
            found = [pickle.loads(content) for content in self._values]
            if rank == 0:
                self.num_exchanged += sum(map(len, self._values))
            self._meeting.wait()
            return found

        return exchange
