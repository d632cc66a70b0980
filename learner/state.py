"""Learner checkpoints: what is trained and its optimizer, as the backend keeps them, version and random state. What is
frozen comes from `policy.model` again."""

from __future__ import annotations

from pathlib import Path

import torch

from learner.backends.base import Backend, Optimizer


def save_state(folder: Path, backend: Backend, optimizer: Optimizer, version: int, rank: int) -> None:
    """Write this rank's part into `folder`. Collective."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(folder, optimizer, version)
    torch.save(torch.get_rng_state(), _rng_file(folder, rank))


def load_state(folder: Path, backend: Backend, optimizer: Optimizer, rank: int) -> int:
    """Read this rank's part from `folder` into policy and optimizer; returns the version. Collective.

    Raises:
        CheckpointError: there is no complete learner state in `folder`, or none that this backend and these ranks read.
    """
    version = backend.load(folder, optimizer)
    if _rng_file(folder, rank).is_file():  # a rank that the checkpoint did not have keeps its own
        torch.set_rng_state(torch.load(_rng_file(folder, rank)))
    return version


def _rng_file(folder: Path, rank: int) -> Path:
    return folder / f"rng_{rank}.pt"
