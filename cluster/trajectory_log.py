"""TrajectoryLog: the append-only Parquet record of what was trained on, one file a step, one row a trajectory."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from cluster.objects import fetch
from cluster.trajectory import ScoredGroup
from cluster.trajectory_records import SCHEMA, RecordedGroup, from_batch, to_rows


class TrajectoryLog:
    """Writes and reads the record of one run; a step's file is complete or absent, whenever the process is killed."""

    def __init__(self, folder: Path, *, timeout_s: float) -> None:
        """`timeout_s` bounds the fetch of one step's groups."""
        self.folder = folder
        self._timeout_s = timeout_s

    def append(self, step: int, groups: Sequence[ScoredGroup]) -> Path:
        """Record the groups that made version `step`; a step that is trained again after a resume replaces its file."""
        what = f"{len(groups)} groups of step {step} to log"
        values = fetch([group.group for group in groups], timeout_s=self._timeout_s, what=what)
        references = fetch([group.reference_logprobs for group in groups], timeout_s=self._timeout_s, what=what)
        rows = [
            row
            for scored, group, reference in zip(groups, values, references, strict=True)
            for row in to_rows(group, scored.rewards, reference, step)
        ]
        path = self._path(step)
        self.folder.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}")
        with draft.open("wb") as file:
            pq.write_table(pa.Table.from_pylist(rows, SCHEMA), file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        return path

    def steps(self) -> list[int]:
        """The recorded steps, oldest first."""
        return sorted(int(path.stem.removeprefix("step-")) for path in self.folder.glob("step-*.parquet"))

    def read(self, step: int) -> list[RecordedGroup]:
        """The groups of one step, in the order in which they were appended."""
        table = pq.read_table(self._path(step), schema=SCHEMA).combine_chunks()
        return [from_batch(batch) for batch in _by_group(table)]

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}.parquet"


def _by_group(table: pa.Table) -> Iterator[pa.RecordBatch]:
    start = 0
    for _, siblings in groupby(table["group_id"].to_pylist()):
        num = len(list(siblings))
        [batch] = table.slice(start, num).to_batches()
        yield batch
        start += num
