"""Small data sets for offline jobs, written by the tests: the digits as conversations, pairs and scored answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mobula.examples.digits.digits import write_digits

Rows = Callable[[str, int, np.random.Generator], dict[str, Any]]
QUESTION = "<image>Which digit is this? Answer in \\boxed{}."


def conversation(image: str, digit: int, rng: np.random.Generator) -> dict[str, Any]:
    """A row of `sft`: the digit is named."""
    return {"messages": [_asked(image), {"role": "assistant", "content": boxed(digit)}]}


def pair(image: str, digit: int, rng: np.random.Generator) -> dict[str, Any]:
    """A row of `dpo` and `reward_model`: the digit against another one."""
    return {"messages": [_asked(image)], "chosen": boxed(digit), "rejected": boxed(_other(digit, rng))}


def form_pair(image: str, digit: int, rng: np.random.Generator) -> dict[str, Any]:
    """A pair that a small model separates soon: an answer in its box against the bare digit."""
    return {"messages": [_asked(image)], "chosen": boxed(digit), "rejected": str(digit)}


def scored(image: str, digit: int, rng: np.random.Generator) -> dict[str, Any]:
    """A row of `reward_model` with loss regression: half of the answers are boxed and have the score 1."""
    is_boxed = bool(rng.integers(2))
    answer = boxed(digit) if is_boxed else str(digit)
    return {"messages": [_asked(image), {"role": "assistant", "content": answer}], "score": float(is_boxed)}


def write_rows(folder: Path, digits: Path, rows: Rows, **num_rows: int) -> Path:
    """`<split>.jsonl` with `num_rows[split]` rows each, beside copies of the digits' images."""
    write_digits(digits, task="digits")
    shutil.copytree(digits / "images", folder / "images", dirs_exist_ok=True)
    rng = np.random.default_rng(0)
    for split, num in num_rows.items():
        lines = (digits / f"{split}.jsonl").read_text().splitlines()[:num]
        found = [json.loads(line) for line in lines]
        made = [{"id": row["id"], **rows(row["image"], int(row["answer"]), rng)} for row in found]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    return folder


def boxed(digit: int) -> str:
    return rf"\boxed{{{digit}}}"


def _asked(image: str) -> dict[str, Any]:
    parts = [
        {"type": "image_url", "image_url": {"url": image}},
        {"type": "text", "text": QUESTION.removeprefix("<image>")},
    ]
    return {"role": "user", "content": parts}


def _other(digit: int, rng: np.random.Generator) -> int:
    return int((digit + rng.integers(1, 10)) % 10)
