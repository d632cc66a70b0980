"""Learner checkpoints: what is trained and its optimizer, sharded; version, random state. Exact resume on any number of
ranks. What is frozen comes from `policy.model` again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from cluster.errors import CheckpointError
from learner.policies.token import TokenPolicy

PARTIAL = StateDictOptions(strict=False)  # the state of the model may lack what is frozen


def save_state(folder: Path, policy: TokenPolicy, optimizer: torch.optim.Optimizer, version: int, rank: int) -> None:
    """Write this rank's part into `folder`. Collective."""
    state = {**_trained_state(policy, optimizer), "version": version}
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
    state = {**_trained_state(policy, optimizer), "version": 0}
    dcp.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    set_state_dict(
        policy, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=PARTIAL
    )
    if _rng_file(folder, rank).is_file():  # a rank that the checkpoint did not have keeps its own
        torch.set_rng_state(torch.load(_rng_file(folder, rank)))
    return int(state["version"])


def _trained_state(policy: TokenPolicy, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    frozen = {name for name, p in policy.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return {"model": {n: t for n, t in model_state.items() if n not in frozen}, "optimizer": optimizer_state}


def _rng_file(folder: Path, rank: int) -> Path:
    return folder / f"rng_{rank}.pt"
