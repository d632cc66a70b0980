"""Data folders in tests: files of images, the configuration of a split, and all of its rows at once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from mobula.actors.datasets.conversations import Conversation, read_conversations
from mobula.actors.datasets.open_split import open_split
from mobula.actors.datasets.prompts import preflight
from mobula.actors.datasets.rows import Row, Split
from mobula.configs.load import load_config
from mobula.configs.schema import DataConfig

LABEL_KEY = "label"


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The file of an image."""
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


class Anything:
    """Takes every row."""

    def check(self, row: Row) -> int:
        return len(row.question)


def data_config(folder: Path, option: str = "jsonl", *words: str, **changes: Any) -> DataConfig:
    """The `data` section of an option, with words and changes on top."""
    return _loaded(option, words).model_copy(update={"path": folder, "cache_path": folder / "cache", **changes})


@cache
def _loaded(option: str, words: tuple[str, ...]) -> DataConfig:
    return load_config([f"data={option}", "data.path=folder", *words], is_complete=False).data


def read_split(folder: Path, split: str = "train", option: str = "jsonl", *words: str, **changes: Any) -> Split:
    """All usable rows of a split, and what was skipped.

    Raises:
        DatasetError: there is no such split, or no row of it is usable.
    """
    opened = open_split(data_config(folder, option, *words, **changes), split, LABEL_KEY)
    report = preflight(opened, Anything(), max_skipped_fraction=1.0, max_checked_rows=0)
    return Split(split, tuple(report.rows), report.skipped)


def write_rows(folder: Path, *rows: Any) -> Path:
    """The folder, whose `train.jsonl` has these rows or lines."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "train.jsonl").write_text("\n".join(lines))
    return folder


def conversation_rows(folder: Path, *rows: Any, form: str = "conversation", **options: Any) -> list[Conversation]:
    """The usable ones of these rows or lines, as offline jobs read them."""
    return list(read_conversations(write_rows(folder, *rows), "train", form, **options).rows)


def read_records(
    folder: Path, row_format: str, *records: Mapping[str, Any] | str, words: Sequence[str] = (), **changes: Any
) -> list[Row]:
    """The rows of `train.jsonl` with these records or lines, all of which are usable."""
    split = read_split(write_rows(folder, *records), "train", "jsonl", *words, row_format=row_format, **changes)
    assert split.skipped == ()
    return list(split.rows)


def record_of_each_format(question: str, answer: str) -> dict[str, dict[str, Any]]:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {
        "question": {"question": question, "answer": answer},
        "messages": {"messages": turns},
        "verl": {"prompt": turns[:1], "reward_model": {"ground_truth": answer}},
        "lightrft": {"prompt": question, "reference": answer},
        "alpaca": {"instruction": question, "output": answer},
        "sharegpt": {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]},
    }
