"""Trajectories of a run on disk, and their replay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from itertools import groupby
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mobula.cluster.errors import PreflightError
from mobula.cluster.files import replacing
from mobula.cluster.records.arrow import SCHEMA, RecordedGroup, from_batch, record_batch, to_rows
from mobula.cluster.records.trajectory import ScoredGroup
from mobula.cluster.replay.buffer import LiveGroups
from mobula.cluster.roles import Learner, UpdateReport
from mobula.cluster.runtime.object_store import fetch

IMAGES_FOLDER = "images"  # of captured sessions, beside the log: the image files, under their keys


@dataclass(eq=False)
class TrajectoryLog:
    """Writes and reads the log of one run. If the process is killed, a step's file is complete or absent."""

    folder: Path
    _: KW_ONLY
    timeout_s: float  # of the fetch of one step's groups
    # gets each step with its file, on the thread that has written it
    on_written: Callable[[int, Path], None] = lambda step, path: None

    def append(self, step: int, groups: Sequence[ScoredGroup]) -> Path:
        """Writes the groups that made version `step`. A step that is repeated after a resume replaces its file."""
        what = f"{len(groups)} groups of step {step} to log"
        values = fetch([group.group for group in groups], timeout_s=self.timeout_s, what=what)
        references = fetch([group.reference_logprobs for group in groups], timeout_s=self.timeout_s, what=what)
        rows = [
            row
            for scored, group, reference in zip(groups, values, references, strict=True)
            for row in to_rows(group, scored.rewards, reference, step)
        ]
        path = self._path(step)
        with replacing(path) as file:
            pq.write_table(pa.Table.from_batches([record_batch(rows)]), file, compression="zstd")
        self.on_written(step, path)
        return path

    def steps(self) -> list[int]:
        return sorted(int(path.stem.removeprefix("step-")) for path in self.folder.glob("step-*.parquet"))

    def check(self, steps: Iterable[int]) -> None:
        """Checks the files of these steps without reading their rows."""
        for path in map(self._path, steps):
            with _readable(path), pq.ParquetFile(path) as file:
                schema, num_rows = file.schema_arrow, file.metadata.num_rows
            unfit = [field.name for field in SCHEMA if not _holds(schema, field)]
            if unfit:
                raise _no_record(path, f"these columns are missing or of another type: {', '.join(unfit)}")
            if num_rows == 0:
                raise _no_record(path, "it has no rows")

    def read(self, step: int) -> list[RecordedGroup]:
        """Returns the groups of one step in the order of `append`."""
        path = self._path(step)
        with _readable(path):
            table = pq.read_table(path, schema=SCHEMA).combine_chunks()
        return [from_batch(batch) for batch in _by_group(table)]

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}.parquet"


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        first_line = str(error).partition("\n")[0]
        raise _no_record(path, f"it cannot be read: {first_line}") from error


def _no_record(path: Path, problem: str) -> PreflightError:
    return PreflightError(
        f"{path} is no record of a step ({problem}): put it back as the run wrote it, or record a run again with "
        "replay.trajectory_log=true"
    )


def _holds(schema: pa.Schema, field: pa.Field) -> bool:
    index = schema.get_field_index(field.name)
    return index >= 0 and schema.field(index).type == field.type


def _by_group(table: pa.Table) -> Iterator[pa.RecordBatch]:
    start = 0
    for _, siblings in groupby(table["group_id"].to_pylist()):
        num = len(list(siblings))
        [batch] = table.slice(start, num).to_batches()
        yield batch
        start += num


def recorded_steps(log: TrajectoryLog) -> range:
    """Returns the steps of a log, from the first."""
    steps = log.steps()
    if not steps:
        raise PreflightError(f"{log.folder} holds no recorded step: run with replay.trajectory_log=true first")
    missing = sorted(set(range(1, steps[-1] + 1)) - set(steps))
    if missing:
        raise PreflightError(
            f"{log.folder} lacks step {missing[0]} ({len(missing)} of {steps[-1]} are missing): a run is replayed from "
            "its first step on, so it must have been recorded from the first step on"
        )
    return range(1, steps[-1] + 1)


async def train_again(
    learner: Learner, log: TrajectoryLog, groups: LiveGroups, on_step: Callable[[UpdateReport], None]
) -> int:
    """Trains every recorded step, starting from version 0 of the learner. Returns the final version. With the run's own
    configuration this reproduces the weights (see `mobula.cluster.recovery.resume`)."""

    def revived(step: int) -> list[ScoredGroup]:
        return [groups.revive(recorded) for recorded in log.read(step)]

    steps = recorded_steps(log)
    for step in steps:
        live = await asyncio.to_thread(revived, step)
        report = await learner.update(live)
        assert report.version == step, f"recorded step {step} made version {report.version}"
        on_step(report)
    return steps[-1]
