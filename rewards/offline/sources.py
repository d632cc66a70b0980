"""Sources of recorded responses: JSONL, responses of an evaluation, Parquet, or recorded trajectories of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mobula.cluster.errors import PreflightError
from mobula.cluster.records.json_lines import check_encoding

BATCH_BYTES = 4 << 20  # of one batch; a larger row is a batch alone
BUFFER_BYTES = 1 << 20  # of a Parquet column read at a time
TRAJECTORIES_FOLDER = "trajectories"  # in a run folder
COLUMNS = ("id", "prompt", "response", "reference", "metadata")
IMAGE_COLUMNS = ("image", "images", "video", "videos", "response_image", "response_images")
# of cluster.records.arrow.SCHEMA: column -> field of a row
TRAJECTORY_COLUMNS = {
    "trajectory_id": "id",
    "prompt_text": "prompt",
    "response_text": "response",
    "references": "reference",
    "metadata": "metadata",
    "response_num_tokens": "generated_tokens",
    "response_is_truncated": "is_truncated",
    "media": "images",
}

Row = bytes | Mapping[str, Any]
"""A line of JSON, or the values of a Parquet row."""


@dataclass(frozen=True)
class Batch:
    """Consecutive rows; `first` is the 1-based number of the first row. `size` is in units of the source."""

    first: int
    rows: Sequence[Row]
    size: int


@dataclass(frozen=True)
class Source:
    """A sequence of rows, read once. `size` is the total: bytes of JSONL, rows of Parquet."""

    path: Path
    kind: str
    size: int
    rows: Callable[[], Iterator[tuple[Row, int, int]]]
    """Yields (row, size, approximate bytes)."""

    def batches(self, num_rows: Callable[[], int]) -> Iterator[Batch]:
        """Yields batches of `num_rows()` rows, or fewer if the rows are large; `num_rows` is called for each batch."""
        batch: list[Row] = []
        first, size, num_bytes, most = 1, 0, 0, num_rows()
        for row, row_size, row_bytes in self.rows():
            if batch and (len(batch) >= most or num_bytes + row_bytes > BATCH_BYTES):
                yield Batch(first, batch, size)
                first, batch, size, num_bytes, most = first + len(batch), [], 0, 0, num_rows()
            batch.append(row)
            size += row_size
            num_bytes += row_bytes
        if batch:
            yield Batch(first, batch, size)


def open_source(path: Path, *, needs_images: bool) -> Source:
    """Opens a file or folder by its kind. Images in Parquet are read only with `needs_images`.

    Raises:
        PreflightError: `path` does not exist, or cannot be scored.
    """
    try:
        if path.is_dir() or path.suffix == ".parquet":
            return _parquet(path, needs_images)
        if path.is_file():  # a pipe can be read only once
            check_encoding(path)
        return Source(path, "jsonl", path.stat().st_size, lambda: _lines(path))
    except ValueError as error:
        raise PreflightError(str(error)) from error
    except OSError as error:
        kinds = "a JSONL or Parquet file, or a run folder"
        raise PreflightError(f"{path} cannot be read ({error.strerror or error}): give {kinds}") from error


def _lines(path: Path) -> Iterator[tuple[Row, int, int]]:
    with path.open("rb") as file:
        for line in file:
            size, rows = len(line), _predictions(line)
            responses: list[Row] = [*rows] or [line]
            for row in responses:
                yield row, size // max(1, len(rows)), size


def _predictions(line: bytes) -> list[dict[str, Any]]:
    """Returns a row for each response of a line that `evaluation.save_responses` wrote; none for another line."""
    if b'"predictions"' not in line or b'"response"' in line:
        return []
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return []  # `read_row` names the fault
    texts = row.get("predictions") if isinstance(row, dict) else None
    if not isinstance(texts, list):
        return []
    shared = {"prompt": row.get("prompt"), "reference": row.get("references"), "metadata": row.get("metadata")}
    lists = {name: row.get(name) for name in ("generated_tokens", "is_truncated")}
    columns = {name: values for name, values in lists.items() if isinstance(values, list) and len(values) == len(texts)}
    return [
        {"id": f"{row.get('id')}#{n}", "response": text, **shared}
        | {name: values[n] for name, values in columns.items() if values[n] is not None}
        for n, text in enumerate(texts)
    ]


def _parquet(path: Path, needs_images: bool) -> Source:
    """Opens a file, or the files of a folder of trajectories."""
    import pyarrow as pa  # JSONL does not need it
    import pyarrow.parquet as pq

    files, kind = [path], "parquet"
    if path.is_dir():
        folder = path / TRAJECTORIES_FOLDER if (path / TRAJECTORIES_FOLDER).is_dir() else path
        files, kind = sorted(folder.glob("step-*.parquet")), "trajectories"
        if not files:
            reason = "give a run that had replay.trajectory_log=true, or a file below evaluations/ of a run"
            raise PreflightError(f"{path} holds no recorded trajectories: {reason}")
    names: dict[Path, dict[str, str]] = {}
    size = 0
    for file in files:
        try:
            with pq.ParquetFile(file) as opened:
                names[file] = _columns(file, opened.schema_arrow.names, needs_images)
                size += opened.metadata.num_rows
        except pa.ArrowInvalid as error:
            raise PreflightError(f"{file} is no Parquet file ({error}): write it again") from error

    def rows() -> Iterator[tuple[Row, int, int]]:
        for file, columns in names.items():
            with pq.ParquetFile(file, buffer_size=BUFFER_BYTES, pre_buffer=False) as opened:
                whole = max(1, opened.metadata.num_rows)
                groups = map(opened.metadata.row_group, range(opened.num_row_groups))
                row_bytes = sum(group.total_byte_size for group in groups) // whole
                most = max(1, min(1024, BATCH_BYTES // max(1, row_bytes)))
                for batch in opened.iter_batches(most, columns=list(columns)):
                    for row in batch.rename_columns([columns[name] for name in batch.schema.names]).to_pylist():
                        yield row, 1, row_bytes

    return Source(path, kind, size, rows)


def _columns(file: Path, names: Sequence[str], needs_images: bool) -> dict[str, str]:
    """Returns column -> field of a row, for the columns to read."""
    own = {name: name for name in (*COLUMNS, *IMAGE_COLUMNS) if name in names}
    columns = {n: TRAJECTORY_COLUMNS[n] for n in names if n in TRAJECTORY_COLUMNS} if "response_text" in names else own
    if "response" not in columns.values():
        raise PreflightError(f"{file} has no column `response`, only {', '.join(sorted(names))}: name one so")
    return {name: field for name, field in columns.items() if needs_images or field not in IMAGE_COLUMNS[:4]}
