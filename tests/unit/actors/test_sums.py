"""The sums dataset: right answers, reproducible, and no pair of numbers in two splits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mobula.actors.datasets.open_split import open_split
from mobula.configs.load import load_config
from mobula.examples.sums.sums import write_sums

SPLITS = ("train", "validation", "test")


def test_answers_are_right_and_no_pair_is_in_two_splits(tmp_path: Path) -> None:
    config = load_config(["data=sums", "policy=smollm2", f"data.path={write_sums(tmp_path / 'sums')}"])
    pairs = []
    for split, size in zip(SPLITS, (315, 50, 100), strict=True):
        rows = open_split(config.data, split, config.rewards.label_key).rows
        assert len(rows) == size
        for place in range(size):
            left, right = map(int, re.findall(r"\d+", rows[place].question))
            assert rows[place].answer == str(left + right) and 1 <= min(left, right) and max(left, right) <= 30
            pairs.append(frozenset((left, right)))
    assert len(set(pairs)) == len(pairs) == 465


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    a, b, c = (write_sums(tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    for split in SPLITS:
        first, same, other = ((folder / f"{split}.jsonl").read_bytes() for folder in (a, b, c))
        assert first == same != other
    with pytest.raises(ValueError, match="choose another folder or delete this one"):
        write_sums(a, seed=1)
