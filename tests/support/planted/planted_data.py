"""Data sets with a planted fault, made from the digits task."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from mobula.examples.digits.digits import write_digits

Rows = list[dict[str, Any]]
Splits = dict[str, Rows]
SPLITS = ("train", "validation", "test")


def write(folder: Path, *, fault: str, task: str = "digits") -> Path:
    """Writes the digits with the fault of this name into `folder`, and returns `folder`."""
    if (folder / "train.jsonl").is_file():
        return folder
    draft = folder.with_name(f"{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    write_digits(draft, task=task)  # type: ignore[arg-type]
    splits = {name: _read(draft / f"{name}.jsonl") for name in SPLITS}
    for name, rows in FAULTS[fault](splits, draft).items():
        (draft / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    draft.rename(folder)
    return folder


def _noise_labels(splits: Splits, folder: Path) -> Splits:
    """Labels of other rows, in every split."""
    return {name: _exchanged(rows, ("answer", "solution")) for name, rows in splits.items()}


def _shuffled_pictures(splits: Splits, folder: Path) -> Splits:
    """Pictures of other rows, in every split."""
    return {name: _exchanged(rows, ("image",)) for name, rows in splits.items()}


def _blank_pictures(splits: Splits, folder: Path) -> Splits:
    """Grey pictures."""
    for path in (folder / "images").iterdir():
        Image.new("L", (56, 56), 128).save(path)
    return splits


def _one_picture(splits: Splits, folder: Path) -> Splits:
    """One picture for all rows."""
    first = splits["train"][0]["image"]
    return {name: [{**row, "image": first} for row in rows] for name, rows in splits.items()}


def _too_easy(splits: Splits, folder: Path) -> Splits:
    """Rows of one digit."""
    return {name: [row for row in rows if row["answer"] == "0"] for name, rows in splits.items()}


def _duplicates(splits: Splits, folder: Path) -> Splits:
    """Ten times the same training rows, under different ids."""
    some = splits["train"][:120]
    repeated = [{**row, "id": f"{row['id']}-{n}"} for n in range(10) for row in some]
    return {**splits, "train": repeated}


def _leak(splits: Splits, folder: Path) -> Splits:
    """A third of the test split is training rows."""
    num = len(splits["test"]) // 3
    copied = [{**row, "id": f"test-{row['id']}"} for row in splits["train"][:num]]
    return {**splits, "test": copied + splits["test"][num:]}


def _half_noise(splits: Splits, folder: Path) -> Splits:
    """Labels of other rows for every second training row."""
    train = splits["train"]
    noisy = _exchanged(train, ("answer", "solution"))
    return {**splits, "train": [pair[n % 2] for n, pair in enumerate(zip(train, noisy, strict=True))]}


def _next_digit(splits: Splits, folder: Path) -> Splits:
    """Training labels are one too high; held-out labels are right."""
    rows = []
    for row in splits["train"]:
        wrong = str((int(row["answer"]) + 1) % 10)
        rows.append({**row, "answer": wrong, "solution": row["solution"].replace(row["answer"], wrong)})
    return {**splits, "train": rows}


FAULTS: dict[str, Callable[[Splits, Path], Splits]] = {
    "noise_labels": _noise_labels,
    "shuffled_pictures": _shuffled_pictures,
    "blank_pictures": _blank_pictures,
    "one_picture": _one_picture,
    "too_easy": _too_easy,
    "duplicates": _duplicates,
    "leak": _leak,
    "half_noise": _half_noise,
    "next_digit": _next_digit,
}


def _exchanged(rows: Rows, columns: tuple[str, ...]) -> Rows:
    others = rows[:]
    random.Random(7).shuffle(others)
    return [{**row, **{name: other[name] for name in columns}} for row, other in zip(rows, others, strict=True)]


def _read(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
