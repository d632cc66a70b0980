"""Learner checkpoints: sharded policy and optimizer, version, random state; exact resume, on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from cluster.errors import CheckpointError
from learner.policies.token import TokenPolicy


def save_state(folder: Path, policy: TokenPolicy, optimizer: torch.optim.Optimizer, version: int, rank: int) -> None:
    """Write this rank's part into `folder`. Collective."""
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "version": version}
    folder.mkdir(parents=True, exist_ok=True)
    dcp.save(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    torch.save(torch.get_rng_state(), _rng_file(folder, rank))


def load_state(folder: Path, policy: TokenPolicy, optimizer: torch.optim.Optimizer, rank: int) -> int:
    """Read this rank's part from `folder` into policy and optimizer; returns the version. Collective.

    Raises:
        CheckpointError: there is no complete learner state in `folder`.
    """
    if not (folder / ".metadata").is_file():
        raise CheckpointError(f"{folder} holds no complete learner state: resume from an older checkpoint")
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "version": 0}
    dcp.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    set_state_dict(policy, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    if _rng_file(folder, rank).is_file():  # a rank that the checkpoint did not have keeps its own
        torch.set_rng_state(torch.load(_rng_file(folder, rank)))
    return int(state["version"])


def _rng_file(folder: Path, rank: int) -> Path:
    return folder / f"rng_{rank}.pt"
