"""A policy and its optimizer to and from a folder, which is read on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from mobula.learner.policies.base import Policy
from mobula.learner.state_files import read_index, read_state, write_state

PARTIAL = StateDictOptions(strict=False)  # the state of the model may lack what is frozen
MODEL = "model."  # prefix of the policy's names in a state
MAX_COPY_BYTES = 256 << 20  # of one rank's state in host memory; a larger one is written without a copy


class ShardedWriter:
    """Writes this rank's part of the trained state, from a copy in host memory.

    A state that is in host memory already, and larger than MAX_COPY_BYTES, is written at once: a copy would take as
    much memory again.

    Ranks coordinate writes in a separate process group: collectives of the writer thread must not interleave with the
    collectives of training. The constructor is collective.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def save(self, folder: Path, policy: Policy, optimizer: torch.optim.Optimizer, version: int) -> Callable[[], None]:
        """Copies the state; the returned function writes it."""
        return self.copied({**_trained_state(policy, optimizer), "version": version}, folder)

    def copied(self, state: dict[str, Any], folder: Path) -> Callable[[], None]:
        """Copies a state of tensors, sharded or whole; the returned function writes it."""
        if _host_bytes(state) > MAX_COPY_BYTES:
            self.write(state, folder)
            return lambda: None
        return partial(self.write, BlockingAsyncStager(cache_staged_state_dict=False).stage(state), folder)

    def write(self, state: dict[str, Any], folder: Path) -> None:
        """Writes a state of tensors, sharded or whole."""
        write_state(state, folder, self._group)


def load_sharded(folder: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> int:
    """Read this rank's part; returns the version. Collective.

    Raises:
        CheckpointError: there is no complete state in `folder`.
    """
    state: dict[str, Any] = {**_trained_state(policy, optimizer), "version": 0}
    read_state(state, folder)
    set_state_dict(
        policy, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=PARTIAL
    )
    return int(state["version"])


def saved_shapes(folder: Path) -> dict[str, torch.Size]:
    """Name in the policy -> shape of each trained parameter in a state.

    Raises:
        CheckpointError: there is no complete state in `folder`.
    """
    entries = read_index(folder).state_dict_metadata.items()
    sizes = {name: saved.size for name, saved in entries if isinstance(saved, TensorStorageMetadata)}
    return {name.removeprefix(MODEL): size for name, size in sizes.items() if name.startswith(MODEL)}


def saved_sharded_weights(folder: Path) -> dict[str, Callable[[], Tensor]]:
    """As `saved_weights`, from any number of ranks.

    Raises:
        CheckpointError: there is no complete state in `folder`.
    """
    tensors = saved_tensors(folder)
    return {name.removeprefix(MODEL): read for name, read in tensors.items() if name.startswith(MODEL)}


def saved_tensors(folder: Path) -> dict[str, Callable[[], Tensor]]:
    """Name -> reader of each tensor that ranks have written to `folder`; read in one process, as a whole."""
    index = read_index(folder)

    def read(name: str, saved: TensorStorageMetadata) -> Tensor:
        state = {name: torch.empty(saved.size, dtype=saved.properties.dtype)}
        read_state(state, folder, index, no_dist=True)
        return state[name]

    entries = index.state_dict_metadata.items()
    return {name: partial(read, name, saved) for name, saved in entries if isinstance(saved, TensorStorageMetadata)}


def _host_bytes(state: dict[str, Any]) -> float:
    """Bytes of one rank in host memory. All ranks have the same number: they copy or write together."""
    tensors = [t for t in tree_leaves(state) if isinstance(t, Tensor) and t.device.type == "cpu"]
    return sum(t.nbytes / (t.device_mesh.size(-1) if isinstance(t, DTensor) else 1) for t in tensors)


def _trained_state(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    is_fresh = not optimizer.state
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    if is_fresh:  # torch has taken a step of nothing to fill the state, and Adam corrects its moments by their number
        for moments in optimizer.state.values():
            if "step" in moments:  # Muon's state has none
                moments["step"].zero_()
    return {"model": _without_frozen(policy, model_state), "optimizer": optimizer_state}


def _without_frozen(policy: Policy, state: dict[str, Any]) -> dict[str, Any]:
    frozen = {name for name, p in policy.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return {name: tensor for name, tensor in state.items() if name not in frozen}
