"""write_data: the data that a run writes itself, by their kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from mobula.actors.datasets.digits import write_digits
from mobula.cluster.user_code import chosen
from mobula.configs.schema.data import DataConfig, DataKind


def write_data(kind: str, folder: Path) -> None:
    """Write the data of `kind`, one of `mobula.configs.schema.data.WRITTEN`, unless the folder holds them.

    Raises:
        ValueError: the folder holds something else, or a package is missing.
    """
    WRITERS[kind](folder)


def data_writer(config: DataConfig) -> Callable[[Path], object]:
    """The function that `data.writer` names, with `data.writer_options`.

    Raises:
        ValueError: it cannot be called with its options.
    """
    return chosen({"none": lambda folder: None}, config.writer, "data.writer", ("folder",), config.writer_options)


WRITERS: Mapping[str, Callable[[Path], Path]] = {
    DataKind.DIGITS: partial(write_digits, task="digits"),
    DataKind.DIGIT_SUM: partial(write_digits, task="digit_sum"),
    DataKind.DIGIT_LIST: partial(write_digits, task="digit_list"),
    DataKind.DIGIT_CLIPS: partial(write_digits, task="digit_clips"),
    DataKind.DIGIT_PAIRS: partial(write_digits, task="digit_pairs"),
    DataKind.DIGIT_SUM_PAIRS: partial(write_digits, task="digit_sum_pairs"),
}
