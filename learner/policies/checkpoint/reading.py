"""Builds models on the meta device and fills them from checkpoint files; a rank reads only its own rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils import swap_tensors
from transformers import GenerationConfig, PreTrainedModel

from mobula.cluster.weight_sync.manifest import checkpoint_files
from mobula.configs.schema import PolicyConfig
from mobula.learner.policies.attention.packed import pack_windows, refuse_without_package
from mobula.learner.policies.checkpoint.stored import GENERATION_FILE, checkpoint_folder, described_files
from mobula.learner.policies.loading import as_stored, disable_dropout, freeze

CPU = torch.device("cpu")
BASE = ".base_layer."  # PEFT inserts it between a module with adapters and the module's own weight


class Rows(Protocol):
    """A weight that reads rows when indexed. A whole tensor satisfies it."""

    def __getitem__(self, index: slice | EllipsisType, /) -> Tensor: ...


Weights = Iterable[tuple[str, Rows]]
"""(state-dict name in the model without adapters, rows) of each weight, tied weights once."""


@dataclass(frozen=True)
class StoredWeights:
    """The weights in a checkpoint's files; indexing a weight reads its rows."""

    folder: Path
    names: Mapping[str, str]  # name in the files -> state-dict name
    model: nn.Module

    def __iter__(self) -> Iterator[tuple[str, Rows]]:
        for file in checkpoint_files(self.folder):
            # `pread` and not `mmap`: mapped pages would count as memory of this process.
            with safe_open(file, framework="pt", backend="pread") as tensors:
                for name in filter(self.names.__contains__, tensors.keys()):
                    yield self.names[name], _StoredRows(self.model, self.names[name], tensors.get_slice(name))


@dataclass(frozen=True)
class _StoredRows:
    """Rows of a file in the layout of the model; transposed experts keep their first axis."""

    model: nn.Module
    name: str
    stored: Rows

    def __getitem__(self, index: slice | EllipsisType) -> Tensor:
        return as_stored(self.model, self.name, self.stored[index])


def load_policy_model(config: PolicyConfig, dtype: torch.dtype, device: torch.device = CPU) -> PreTrainedModel:
    """Returns the whole model of `policy.model` on one device, ready to train, with frozen parameters marked."""
    model, weights = unread_policy_model(config, dtype)
    fill(model, weights, device)
    nn.Module.to(model, device)  # moves the buffers
    return model


def unread_policy_model(config: PolicyConfig, dtype: torch.dtype) -> tuple[PreTrainedModel, StoredWeights]:
    """Returns the model of `policy.model` on the meta device, with frozen parameters marked, and its weights."""
    model, weights = unread_model(config.model, dtype, config.attention)
    freeze(model, config.freeze)
    if not config.dropout:
        disable_dropout(model)
    return model, weights


def unread_model(
    source: str, dtype: torch.dtype, attention: str, model_class: type[PreTrainedModel] | None = None
) -> tuple[PreTrainedModel, StoredWeights]:
    """Returns the model of a checkpoint folder or hub name, with parameters on the meta device, and its weights.

    `model_class` replaces the class of a policy.
    """
    refuse_without_package(attention)
    folder = checkpoint_folder(source)
    described = described_files(folder, model_class, dtype, attention)
    model = described.model
    model.config.name_or_path = source
    if model.can_generate() and (folder / GENERATION_FILE).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    _compute_buffers(model)
    pack_windows(model)
    states = {name: state for state, name in described.pushed.items()}
    names = {file_name: states[name] for file_name, name in described.names.items()}
    return model, StoredWeights(folder, names, model)


def _compute_buffers(model: PreTrainedModel) -> None:
    """Computes the buffers on the CPU, as `from_pretrained` does: most buffers are in no file."""
    for buffer in model.buffers():
        swap_tensors(buffer, torch.empty_like(buffer, device=CPU))
    for module in model.modules():
        vars(module).pop("_is_hf_initialized", None)  # set when the buffers had no values
    model.initialize_weights()  # parameters stay without values


@torch.no_grad()
def fill(model: nn.Module, weights: Weights, device: torch.device) -> None:
    """Allocates the parameters on the meta device on `device` and copies this rank's rows into them.

    Not collective. Parameters with values keep them if `weights` lacks them.
    """
    lacking = allocate(model, device)
    state = {plain_name(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    for name, rows in weights:
        if name in state:
            _copy(state[name], rows)
            lacking.discard(state[name])
    refuse_lacking(model, lacking)


def plain_name(name: str) -> str:
    """Returns the state-dict name of a weight in the model without adapters."""
    return name.replace(BASE, ".")


def allocate(model: nn.Module, device: torch.device) -> set[Tensor]:
    """Allocates the parameters on the meta device on `device` and returns them."""
    empty: set[Tensor] = {parameter for parameter in model.parameters() if parameter.device.type == "meta"}
    for parameter in empty:
        # Swapped, so that tied weights, optimizers and shards keep their tensor objects.
        memory = torch.empty_like(parameter, device=device)
        swap_tensors(parameter, nn.Parameter(memory, requires_grad=parameter.requires_grad))
    return empty


def refuse_lacking(model: nn.Module, lacking: set[Tensor]) -> None:
    """Raises: ValueError: parameters of the model are in no file."""
    if lacking:
        names = [name for name, parameter in model.named_parameters() if parameter in lacking]
        raise ValueError(
            f"policy.model lacks {names[0]} and {len(names) - 1} more weights of its config.json: download it again, "
            "or save the whole model"
        )


def _copy(target: Tensor, rows: Rows) -> None:
    if not isinstance(target, DTensor):
        target.copy_(rows[...])
        return
    shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    if shape[0] > 0:  # safetensors refuses an empty slice behind the last row
        target.to_local().copy_(rows[offset[0] : offset[0] + shape[0]])
