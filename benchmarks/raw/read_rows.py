"""One side of `data_reading`: read a Parquet split in this process, and print rows, seconds and peak memory as JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq

from benchmarks.harness.peak_memory import peak_bytes
from mobula.actors.datasets.open_split import open_split
from mobula.configs.load import load_config

RAW_BATCH = 1000


def read_shuffled(folder: Path, shuffle_bytes: int) -> int:
    """Every row of the first epoch, as a run asks them; the number of rows."""
    words = [f"data.path={folder}", f"data.shuffle_bytes={shuffle_bytes}", f"data.cache_path={folder / 'cache'}"]
    data = load_config(["data=verl", *words], is_complete=False).data
    rows = open_split(data, "train", "label").rows.endless(0)
    num, total = len(rows), 0
    for index in range(num):
        total += len(rows.row(index).answer) > 0
    return total


def read_in_file_order(folder: Path) -> int:
    file = pq.ParquetFile(folder / "train.parquet")
    return sum(len(batch.to_pylist()) for batch in file.iter_batches(batch_size=RAW_BATCH, use_threads=False))


def main() -> None:
    who, folder, shuffle_bytes = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    started = time.perf_counter()
    num = read_shuffled(folder, shuffle_bytes) if who == "ours" else read_in_file_order(folder)
    seconds = time.perf_counter() - started
    peak = peak_bytes() / 2**20
    sys.stdout.write(json.dumps({"num_rows": num, "seconds": seconds, "peak_mb": peak}))


if __name__ == "__main__":
    main()
