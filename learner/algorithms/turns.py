"""Turns of an episode on the axis T: runs of tokens that the policy wrote, with those of the environment in between."""

from __future__ import annotations

import numpy as np


def turns_of(mask: np.ndarray) -> list[tuple[int, int]]:
    """[start, end) of every run of True, in order; a response of one turn is one run.

    Args:
        mask: bool [T], trained tokens.

    Example:
        >>> turns_of(np.array([True, True, False, True]))
        [(0, 2), (3, 4)]
    """
    changes = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return list(zip(changes[::2].tolist(), changes[1::2].tolist(), strict=True))
