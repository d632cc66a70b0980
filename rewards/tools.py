"""What a reward function is given to work with, whatever its options."""

from __future__ import annotations

from dataclasses import dataclass

from rewards.isolated import IsolatedProcess


@dataclass(frozen=True)
class Tools:
    """`isolated` runs what may hang; models compute on `device` ("cpu", "cuda") in `dtype` (a name of torch's)."""

    isolated: IsolatedProcess
    device: str
    dtype: str
