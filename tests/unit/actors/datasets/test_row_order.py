"""Shuffling without all rows in memory, curricula, and rows that are checked late."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_rows import data_config
from hypothesis import given
from hypothesis import strategies as st

from mobula.actors.datasets.mixture import CURRICULA, epoch_order, windowed_order
from mobula.actors.datasets.open_split import curriculum_of, open_split
from mobula.actors.datasets.prompts import PreflightReport, preflight
from mobula.actors.datasets.readers.base import BlockCache
from mobula.actors.datasets.rows import Row
from mobula.cluster.errors import DatasetError
from mobula.configs.schema.data import CurriculumConfig


class Checker:
    """A prompt is as long as its question."""

    def check(self, row: Row) -> int:
        return len(row.question)


def checked(folder: Path, option: str = "jsonl", **changes: object) -> PreflightReport:
    config = data_config(folder, option, **changes)
    return preflight(
        open_split(config, "train", "label"),
        Checker(),
        max_skipped_fraction=1.0,
        max_checked_rows=config.max_checked_rows,
        difficulty=found.difficulty if (found := curriculum_of(config)) else None,
    )


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 50)), min_size=1, max_size=12), st.integers(1, 200))
def test_a_windowed_order_is_a_permutation_that_reads_few_blocks_at_a_time(
    sizes: list[tuple[int, int]], window_bytes: int
) -> None:
    blocks = np.array(sizes, dtype=np.int64)
    order = windowed_order(blocks, window_bytes, 7, 0)
    assert sorted(order.tolist()) == list(range(int(blocks[:, 0].sum())))
    if blocks[:, 1].sum() <= window_bytes:
        assert order.tolist() == epoch_order(len(order), 7, 0).tolist()
        return
    block_of = np.repeat(np.arange(len(blocks)), blocks[:, 0])[order]
    first, last = {}, {}
    for position, block in enumerate(block_of.tolist()):
        first.setdefault(block, position)
        last[block] = position
    for position in range(len(order)):
        held = [block for block in first if first[block] <= position <= last[block]]
        assert len(held) == 1 or blocks[held, 1].sum() <= window_bytes


def test_epochs_and_seeds_have_windows_of_their_own() -> None:
    blocks = np.array([[10, 10]] * 20)
    orders = [windowed_order(blocks, 40, seed, epoch).tolist() for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert orders[0] == windowed_order(blocks, 40, 0, 0).tolist()
    assert len({tuple(order) for order in orders}) == 3


def write_parquet(folder: Path, num: int, group: int) -> None:
    rows = [{"id": str(n), "question": "x" * 500, "answer": str(n)} for n in range(num)]  # small as a dictionary
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet", row_group_size=group)


def test_parquet_rows_are_shuffled_over_all_row_groups_and_each_group_is_read_once_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parquet(tmp_path, 400, 20)
    read: list[int] = []
    original = pq.ParquetFile.read_row_group

    def counted(self: pq.ParquetFile, group: int, **options: object) -> pa.Table:
        read.append(group)
        return original(self, group, **options)

    size = pq.ParquetFile(tmp_path / "train.parquet").metadata.row_group(0).total_byte_size
    rows = checked(tmp_path, "parquet", shuffle_bytes=6 * size).rows
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    drawn = rows.endless(0)
    ids = [drawn.row(index).sample_id for index in range(400)]
    assert sorted(ids, key=int) == [str(n) for n in range(400)]
    assert len(read) == len(set(read)) >= 19, "the check of the rows may have left the last one in memory"
    groups = [int(sample) // 20 for sample in ids[:60]]
    assert len(set(groups)) > 3 and groups != sorted(groups)


def test_a_block_cache_keeps_no_more_than_its_bytes() -> None:
    loaded: list[int] = []

    def load(block: int) -> tuple[str, int]:
        loaded.append(block)
        return f"block {block}", 10

    cache = BlockCache(load, 25)
    assert [cache.get(block) for block in (0, 1, 0, 2, 0, 1)][-1] == "block 1"
    assert loaded == [0, 1, 2, 1]


def levels(folder: Path, num: int = 40) -> None:
    rows = [{"id": str(n), "question": "x" * (num - n), "answer": "1", "level": n % 10} for n in range(num)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))


def curriculum(kind: str, key: str, num_stages: int = 4, num_epochs: int = 1) -> CurriculumConfig:
    return CurriculumConfig(kind=kind, key=key, num_stages=num_stages, num_epochs=num_epochs)


def test_the_schema_names_every_curriculum() -> None:
    assert CurriculumConfig.model_fields["kind"].annotation.__args__ == tuple(CURRICULA)


@pytest.mark.parametrize(("kind", "sign"), [("easy_first", 1), ("hard_first", -1)])
@pytest.mark.parametrize("key", ["level", "prompt_tokens"])
def test_a_curriculum_asks_stage_after_stage_and_shuffles_within(
    tmp_path: Path, kind: str, sign: int, key: str
) -> None:
    levels(tmp_path)
    rows = checked(tmp_path, curriculum=curriculum(kind, key)).rows
    drawn = rows.endless(0)
    epochs = [[drawn.row(index) for index in range(start, start + 40)] for start in (0, 40)]
    difficulty = [row.metadata["level"] if key == "level" else len(row.question) for row in epochs[0]]
    stages = [sorted(difficulty[start : start + 10]) for start in range(0, 40, 10)]
    assert [value for stage in stages[::sign] for value in stage] == sorted(difficulty)
    assert difficulty != sorted(difficulty)[::sign], "rows of a stage are shuffled"
    assert len({row.sample_id for row in epochs[0]}) == 40
    assert [row.sample_id for row in epochs[1]] == [str(n) for n in epoch_order(40, 0, 1)], (
        "the epochs behind are shuffled as a whole"
    )


def test_rows_without_a_difficulty_are_skipped_and_named(tmp_path: Path) -> None:
    levels(tmp_path)
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write('\n{"id": "last", "question": "?", "answer": "1", "level": "high"}')
    report = checked(tmp_path, curriculum=curriculum("easy_first", "level"))
    assert [(skipped.sample, skipped.reason) for skipped in report.skipped] == [("last", "bad_difficulty")]
    assert len(report.rows) == 40


def test_a_curriculum_needs_all_rows_checked(tmp_path: Path) -> None:
    levels(tmp_path)
    with pytest.raises(DatasetError, match=r"leaves 30 of the split train unchecked: set data\.max_checked_rows=0"):
        checked(tmp_path, curriculum=curriculum("easy_first", "level"), max_checked_rows=10)
