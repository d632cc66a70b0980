"""Reading data: rows/s and peak memory of 1,000,000 Parquet rows, read in the shuffled order of an epoch.

Each side is a process of its own: ours opens the split as a run does and asks row after row; the raw side reads the
same file by record batches in file order with pyarrow alone, without shuffling and without making rows. The file is
written twice: in row groups of 1,000 rows, and as one row group, as pandas writes it, which ours copies once.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness.measure import QUICK, Claim, Effort, Findings, Measurements, Side, interleave, rates

NUM_ROWS, NUM_SMALL = 1_000_000, 100_000
QUICK_ROWS = (100_000, 10_000)
GROUP_ROWS = 1000
SHUFFLE_BYTES = 32 << 20
WRITTEN_ROWS = 10_000  # of the file that are in memory while it is written
MAX_GROWTH_MB = 120.0  # of the peak memory from the small file to the large one: an index and an order, 24 bytes a row
MIN_ROWS_PER_S = 2000.0  # a hundred times what engines of the smallest model ask
TIMEOUT_S = 1800.0
UNIT = "rows/s"


def measure(effort: Effort, overrides: Sequence[str]) -> Findings:
    """All sides in turn; the overrides say nothing here."""
    large, small = QUICK_ROWS if effort == QUICK else (NUM_ROWS, NUM_SMALL)
    once = Effort(repeats=1, warmups=0, num_steps=0)  # each side takes a minute or two, and its rates differ little
    with tempfile.TemporaryDirectory(prefix="mobula-") as folder:
        bench = _Bench(Path(folder))
        sides = {
            "large": bench.side("ours", large, GROUP_ROWS),
            "small": bench.side("ours", small, GROUP_ROWS),
            "one_group": bench.side("ours", large, large),
            "raw": bench.side("raw", large, GROUP_ROWS),
        }
        found = asyncio.run(interleave(sides, once))
    return _findings(found, bench, large, small)


class _Bench:
    """Writes the files and keeps the largest memory of each side."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.peak_mb: dict[tuple[str, int, int], float] = {}

    def side(self, who: str, num_rows: int, group_rows: int) -> Side:
        folder = self._folder / f"{num_rows}-{group_rows}"
        if not folder.exists():
            _write(folder, num_rows, group_rows)

        async def measured(round_number: int) -> float:
            words = [sys.executable, "-m", "benchmarks.raw.read_rows", who, str(folder), str(SHUFFLE_BYTES)]
            done = await asyncio.to_thread(
                subprocess.run, words, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
            )
            said: dict[str, Any] = json.loads(done.stdout)
            assert said["num_rows"] == num_rows, f"{who} read {said['num_rows']} of {num_rows} rows"
            key = (who, num_rows, group_rows)
            self.peak_mb[key] = max(said["peak_mb"], self.peak_mb.get(key, 0.0))
            return num_rows / said["seconds"]

        return measured


def _write(folder: Path, num_rows: int, group_rows: int) -> None:
    """Rows in verl's schema, about 300 bytes each."""
    folder.mkdir()
    batches = ([_row(n) for n in range(start, start + WRITTEN_ROWS)] for start in range(0, num_rows, WRITTEN_ROWS))
    first = pa.Table.from_pylist(next(batches))
    tables = [first, *(pa.Table.from_pylist(rows, schema=first.schema) for rows in batches)]
    pq.write_table(pa.concat_tables(tables), folder / "train.parquet", row_group_size=group_rows)


def _row(number: int) -> dict[str, Any]:
    text = f"What is the sum of {number} and {number % 977}? Show every step of your work, then give the answer alone. "
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": text * 2}],
        "reward_model": {"style": "rule", "ground_truth": str(number + number % 977)},
        "extra_info": {"index": number, "split": "train", "id": f"sum-{number}"},
    }


def _findings(found: dict[str, tuple[float, ...]], bench: _Bench, large: int, small: int) -> Findings:
    read = "open the split, read every row of an epoch in shuffled order"
    series = {
        "large": Measurements(f"{large:,} rows in row groups of {GROUP_ROWS:,}: {read}", UNIT, found["large"]),
        "small": Measurements(f"{small:,} rows in row groups of {GROUP_ROWS:,}: {read}", UNIT, found["small"]),
        "one_group": Measurements(f"{large:,} rows in one row group, copy included: {read}", UNIT, found["one_group"]),
        "raw": Measurements(f"{large:,} rows: pyarrow in file order, as Python objects", UNIT, found["raw"]),
    }
    peaks = bench.peak_mb
    growth = peaks["ours", large, GROUP_ROWS] - peaks["ours", small, GROUP_ROWS]
    claims = (
        Claim(f"{large:,} rows: {UNIT} / {MIN_ROWS_PER_S:,.0f}", series["large"].median / MIN_ROWS_PER_S, 1.0),
        Claim(f"peak MB of {large:,} rows minus that of {small:,}", growth, MAX_GROWTH_MB, at_least=False),
        Claim("shuffled rows / pyarrow in file order", rates(series["large"], series["raw"])),
        Claim("one row group / row groups", rates(series["one_group"], series["large"])),
    )
    named = {f"{who} {num} rows, groups of {group}": round(peak, 1) for (who, num, group), peak in peaks.items()}
    return Findings({"shuffle_bytes": SHUFFLE_BYTES, "peak_mb": named}, series, claims)
