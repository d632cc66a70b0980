"""A policy and its optimizer to and from a folder, in torch's distributed format: it is read on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from mobula.cluster.errors import CheckpointError
from mobula.learner.policies.base import Policy

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
        dcp.save(state, checkpoint_id=folder, process_group=self._group, no_dist=self._group is None)


class _IdleWeights(DefaultLoadPlanner):
    """Takes a checkpoint without the optimizer's state of weights that no gradient has reached.

    The last block of some flow models computes a text that nothing reads. Such weights keep the fresh state.
    """

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None and self.state_dict is not None, "the planner has been set up"
        lacking = [key for key in self.state_dict if key not in self.metadata.state_dict_metadata]
        self.allow_partial_load = all(key.startswith("optimizer.state.") for key in lacking)
        return super().create_local_plan()


def load_sharded(folder: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> int:
    """Read this rank's part; returns the version. Collective.

    Raises:
        CheckpointError: there is no complete state in `folder`.
    """
    _refuse_incomplete(folder)
    state: dict[str, Any] = {**_trained_state(policy, optimizer), "version": 0}
    dcp.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized(), planner=_IdleWeights())
    set_state_dict(
        policy, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=PARTIAL
    )
    return int(state["version"])


def saved_shapes(folder: Path) -> dict[str, torch.Size]:
    """Name in the policy -> shape of each trained parameter in a state.

    Raises:
        CheckpointError: there is no complete state in `folder`.
    """
    _refuse_incomplete(folder)
    entries = _Reader(folder).read_metadata().state_dict_metadata.items()
    sizes = {name: saved.size for name, saved in entries if isinstance(saved, TensorStorageMetadata)}
    return {name.removeprefix(MODEL): size for name, size in sizes.items() if name.startswith(MODEL)}


def saved_sharded_weights(folder: Path) -> dict[str, Callable[[], Tensor]]:
    """As `saved_weights`, from any number of ranks.

    Raises:
        CheckpointError: there is no complete state in `folder`.
    """
    _refuse_incomplete(folder)
    tensors = saved_tensors(folder)
    return {name.removeprefix(MODEL): read for name, read in tensors.items() if name.startswith(MODEL)}


def saved_tensors(folder: Path) -> dict[str, Callable[[], Tensor]]:
    """Name -> reader of each tensor that ranks have written to `folder`; read in one process, as a whole."""
    metadata = _Reader(folder).read_metadata()

    def read(name: str, saved: TensorStorageMetadata) -> Tensor:
        state = {name: torch.empty(saved.size, dtype=saved.properties.dtype)}
        dcp.load(state, storage_reader=_Reader(folder, metadata), no_dist=True)
        return state[name]

    entries = metadata.state_dict_metadata.items()
    return {name: partial(read, name, saved) for name, saved in entries if isinstance(saved, TensorStorageMetadata)}


class _Reader(dcp.FileSystemReader):
    """Reads the metadata file once for many loads: it describes every shard of every tensor."""

    def __init__(self, folder: Path, metadata: Metadata | None = None) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata or super().read_metadata(*args, **kwargs)


def _host_bytes(state: dict[str, Any]) -> float:
    """Bytes of one rank in host memory. All ranks have the same number: they copy or write together."""
    tensors = [t for t in tree_leaves(state) if isinstance(t, Tensor) and t.device.type == "cpu"]
    return sum(t.nbytes / (t.device_mesh.size(-1) if isinstance(t, DTensor) else 1) for t in tensors)


def _refuse_incomplete(folder: Path) -> None:
    if not (folder / ".metadata").is_file():
        raise CheckpointError(f"{folder} holds no complete learner state: use an older checkpoint")


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
