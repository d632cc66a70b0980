"""Input and result of a stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

Figures = Mapping[str, float | int | str]
"""Measured numbers by name, for the table and the JSON file."""
ONE_PROCESS = ("learner=single", "resources.learner.num_workers=1", "algorithm.kl.coef=0", "warm_start=none")
MIB = 1 << 20


class NotHereError(Exception):
    """This machine lacks what the stage needs; the message names it."""


@dataclass(frozen=True)
class Context:
    """The device that is checked, and a folder for the files of one stage."""

    device: str  # cpu | cuda
    folder: Path

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def num_gpus(self) -> int:
        return torch.cuda.device_count() if self.is_cuda else 0

    def words(self, *own: str) -> tuple[str, ...]:
        """Overrides of a run in one process on the device; of two words for one key the later one holds."""
        preset = ("resources=gpu_1",) if self.is_cuda else ("resources=laptop",)
        named = {override.partition("=")[0]: override for override in (*preset, *ONE_PROCESS, *own)}
        return tuple(named.values())

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def restart_peak(self) -> None:
        self.synchronize()
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()

    def peak_figures(self) -> Figures:
        """Peak memory of torch on the GPU since `restart_peak`; nothing on a CPU."""
        return {"peak_mib": torch.cuda.max_memory_allocated() // MIB} if self.is_cuda else {}
