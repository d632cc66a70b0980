"""Sources of records to score: a JSONL file, a Parquet file, or a run's recorded trajectories, cut into parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mobula.cluster.errors import PreflightError
from mobula.cluster.records.json_lines import check_encoding
from mobula.rewards.offline.sources.jsonl import Batch, stretches


class SourcePart(Protocol):
    """A piece of the source that one process reads and scores by itself; its text names it in errors."""

    @property
    def size(self) -> int: ...

    def batches(self, *, with_metadata: bool) -> Iterator[Batch]: ...


@dataclass(frozen=True)
class Source:
    """The parts of what is scored, in order; `unit` is what their sizes count."""

    path: Path
    kind: str
    unit: str
    parts: Sequence[SourcePart]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


def open_source(path: Path) -> Source:
    """Find out what `path` is.

    Raises:
        PreflightError: it is not there, or nothing that can be scored.
    """
    try:
        if path.is_dir() or path.suffix == ".parquet":
            from mobula.rewards.offline.sources import columnar  # pyarrow, which JSONL has no need of

            return Source(path, *columnar.parts_of(path))
        if not path.is_file() and path.exists():
            raise PreflightError(
                f"{path} is a pipe or a device, which cannot be read in parts: write it to a file first"
            )
        check_encoding(path)
        return Source(path, "jsonl", "bytes", stretches(path))
    except ValueError as error:
        raise PreflightError(str(error)) from error
    except OSError as error:
        reason = error.strerror or error
        kinds = "a JSONL or Parquet file, or a run folder"
        raise PreflightError(f"{path} cannot be read ({reason}): give {kinds}") from error
