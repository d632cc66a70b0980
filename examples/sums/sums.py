r"""Sums as text questions: JSONL rows without media, made from a seed.

The smallest task on which a released language model of 135 M parameters is neither lost nor perfect before RL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations_with_replacement
from pathlib import Path
from random import Random
from typing import TypedDict

from mobula.actors.datasets.written import install_dataset

FORMAT_VERSION = 1
LOWEST, HIGHEST = 1, 30


class SumRow(TypedDict):
    """One line of a split."""

    id: str
    question: str
    answer: str
    solution: str


def write_sums(
    folder: Path, *, seed: int = 0, num_train: int = 315, num_validation: int = 50, num_test: int = 100
) -> Path:
    """Write questions such as `What is 17 + 28?` into `folder` and return `folder`; see `install_dataset`.

    Every pair of numbers from 1 to 30 is asked at most once, in one order, and is in one split alone. The same
    arguments give the same bytes.

    Raises:
        ValueError: the folder holds something else.
    """
    sizes = {"train": num_train, "validation": num_validation, "test": num_test}
    marker = {"format_version": FORMAT_VERSION, "task": "sums", "seed": seed, **sizes}
    return install_dataset(folder, marker, lambda _: _rows(seed, sizes))


def _rows(seed: int, sizes: Mapping[str, int]) -> dict[str, Sequence[SumRow]]:
    random = Random(seed)
    pairs = random.sample(list(combinations_with_replacement(range(LOWEST, HIGHEST + 1), 2)), sum(sizes.values()))
    drawn = iter(pairs)
    return {split: [_row(*random.sample(next(drawn), 2)) for _ in range(size)] for split, size in sizes.items()}


def _row(left: int, right: int) -> SumRow:
    total = str(left + right)
    return SumRow(id=f"sum-{left}-{right}", question=f"What is {left} + {right}?", answer=total, solution=total)
