"""What a reward function is given to work with, whatever its options."""

from __future__ import annotations

from dataclasses import dataclass

from rewards.isolated import Isolated


@dataclass(frozen=True)
class Tools:
    """`isolated` runs what may hang, in one process or in a pool; models compute on `device` in `dtype`.

    How many answers are worked on side by side is how many processes `isolated` has (`IsolatedPool.num_processes`).
    """

    isolated: Isolated
    device: str
    dtype: str
