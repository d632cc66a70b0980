"""Checked access to references, metadata and options of reward functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mobula.cluster.errors import RewardError
from mobula.cluster.records.markup import marked_answer


def given_references(references: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the references that are not blank, in order; of a worked answer that ends in `#### 24`, as in gsm8k, the
    24.

    Raises:
        RewardError: all are blank.
    """
    given = tuple(marked_answer(reference)[1] for reference in references if reference.strip())
    if not given:
        raise RewardError("the prompt has no reference answer to compare with")
    return given


def given_metadata(metadata: Mapping[str, Any], key: str) -> Any:
    """Returns the value of a key in the prompt's metadata.

    Raises:
        RewardError: the key is missing or null.
    """
    if metadata.get(key) is None:
        raise RewardError(f"the prompt's metadata has no {key!r}: it has {', '.join(map(repr, metadata)) or 'nothing'}")
    return metadata[key]


def check_true_or_false(**options: object) -> None:
    """Refuses options that are not bool, because the text "false" is truthy."""
    for option, value in options.items():
        if not isinstance(value, bool):
            raise ValueError(f"{option}={value!r} is neither true nor false")


def check_number(option: str, value: object, *, low: float, high: float = math.inf) -> None:
    """Refuses an option that is not a finite number from `low` to `high`."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high or math.isinf(value):
        reach = f"from {low:g} to {high:g}" if math.isfinite(high) else f"of {low:g} or more"
        raise ValueError(f"{option}={value!r} is unfit: give a number {reach}")
