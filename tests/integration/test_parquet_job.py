"""A run on verl's Parquet with images in it: read by row groups, prepared by a worker, trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jobs import Job

from mobula.cluster.metrics.report.run_folder import read_run_folder
from mobula.examples.digits.digits import write_digits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NUM_STEPS = 2


def verl_record(folder: Path, row: dict[str, Any]) -> dict[str, Any]:
    """A row of digits in verl's schema."""
    paths = row["image"] if isinstance(row["image"], list) else [row["image"]]
    return {
        "prompt": [{"role": "user", "content": row["question"]}],
        "images": [{"bytes": (folder / path).read_bytes(), "path": path} for path in paths],
        "reward_model": {"style": "rule", "ground_truth": row["answer"]},
        "extra_info": {"id": row["id"]},
    }


def test_parquet_with_images_is_trained_on(tmp_path: Path) -> None:
    digits, data = write_digits(tmp_path / "digits", task="digit_sum"), tmp_path / "verl"
    data.mkdir()
    for split in ("train", "test"):
        records = [verl_record(digits, json.loads(line)) for line in (digits / f"{split}.jsonl").open()]
        pq.write_table(pa.Table.from_pylist(records), data / f"{split}.parquet", row_group_size=100)
    words = ("experiment=digits", "data=verl", f"data.path={data}", "data.splits={validation: test}")
    few = ("resources=laptop_overlapped", "learner=single", f"num_steps={NUM_STEPS}", "sampler.max_tokens=8")
    apart = ("resources.processor.num_workers=1", "resources.processor.num_cpus=0.1")
    with Job(tmp_path, (*words, *few, *apart, "warm_start.num_steps=0")) as job:
        job.finish(job.start())
    assert pq.ParquetFile(data / "train.parquet").num_row_groups > 1
    found = read_run_folder(job.run_folder)
    assert (found.summary.status, found.summary.version) == ("done", NUM_STEPS)
    assert found.summary.logprob_gap_mean < 1e-5
    assert found.summary.media_bytes_unique > 0 and not found.skipped
