"""Tensors of a checkpoint: compared with the model that transformers builds, without reading weights, and pushed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from mobula.cluster.weight_sync.manifest import (
    Manifest,
    Payload,
    StoredTensor,
    TensorSpec,
    checkpoint_files,
    stored_tensors,
)
from mobula.configs.schema import RunConfig
from mobula.learner.policies.families import checkpoint_prefix, frozen_prefixes
from mobula.learner.policies.loading import as_stored, checkpoint_names, described_model, saved_names

GENERATION_FILE = "generation_config.json"

FLOATING = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class StoredModel:
    """Tensor names of a checkpoint in its files and in a weight push. The learner takes push names from its model."""

    manifest: Manifest  # of a push, in float32
    names: Mapping[str, str]  # name in the files -> name in a push
    tensors: Mapping[str, StoredTensor]  # name in the files -> shape and dtype there
    left_out: tuple[str, ...]  # names in the files that match no part of the model and are not known to be unused
    missing: tuple[str, ...]  # tensors of the model that the files lack
    misshapen: tuple[str, ...]  # tensors whose shape differs from config.json
    ties: Mapping[str, str]  # name in the files -> name of the tensor it is tied to, if the files have both
    copies: Mapping[str, str]  # file name of the copy of a tied tensor -> the tensor's name in a push

    def in_dtype(self, dtype: str) -> Manifest:
        return Manifest(tuple(TensorSpec(spec.name, spec.shape, dtype) for spec in self.manifest.tensors))


@dataclass(frozen=True)
class SavedDtypes:
    """The dtypes in which trained tensors are written, taken from the source checkpoint."""

    by_name: Mapping[str, torch.dtype]  # name in a push -> dtype
    main: torch.dtype  # dtype of most values, and of tensors that are not in `by_name`

    @classmethod
    def of_model(cls, folder: Path, dtype: str = "") -> SavedDtypes:
        """Returns the dtypes of the files in `folder`, or `dtype` for all tensors."""
        stored = stored_model(folder)
        return cls._of({stored.names[name]: t for name, t in stored.tensors.items() if name in stored.names}, dtype)

    @classmethod
    def of_files(cls, folder: Path, dtype: str = "") -> SavedDtypes:
        """As `of_model`, for a model whose files use state-dict names."""
        return cls._of(stored_tensors(folder), dtype)

    @classmethod
    def _of(cls, tensors: Mapping[str, StoredTensor], dtype: str) -> SavedDtypes:
        if dtype:
            return cls({}, getattr(torch, dtype))
        found = {name: FLOATING[tensor.dtype] for name, tensor in tensors.items() if tensor.dtype in FLOATING}
        counts: Counter[torch.dtype] = Counter()
        for name, one in found.items():
            counts[one] += prod(tensors[name].shape)
        return cls(found, max(counts, key=counts.__getitem__, default=torch.float32))

    def described(self, name: str, tensor: Tensor) -> Tensor:
        """Returns a meta tensor with the shape and dtype in which `tensor` is written."""
        dtype = self.by_name.get(name, self.main) if tensor.is_floating_point() else tensor.dtype
        return torch.empty(tensor.shape, dtype=dtype, device="meta")

    def cast(self, name: str, tensor: Tensor) -> Tensor:
        dtype = self.described(name, tensor).dtype
        if tensor.dtype == dtype:
            return tensor
        if dtype == torch.float16 and tensor.numel() and tensor.abs().max() > torch.finfo(dtype).max:
            raise ValueError(f"{name} has values that float16 does not hold: write it with --dtype bfloat16 or float32")
        return tensor.to(dtype)


@dataclass(frozen=True)
class DescribedFiles:
    """A model on the meta device and the names of its tensors in the checkpoint files."""

    model: PreTrainedModel
    info: Mapping[str, Any]  # loading report of transformers: missing, unexpected and mismatched keys
    tensors: Mapping[str, StoredTensor]  # name in the files -> shape and dtype
    pushed: Mapping[str, str]  # state-dict name -> name in a push
    names: Mapping[str, str]  # name in the files -> name in a push
    copies: Mapping[str, str]  # as in `StoredModel`


def checkpoint_folder(source: str) -> Path:
    """Returns the folder of `policy.model`; downloads it if `source` is a hub name."""
    if Path(source).is_dir():
        return Path(source)
    try:
        # Skips weights in formats that are not read.
        return Path(snapshot_download(source, allow_patterns=["*.json", "model*.safetensors"], ignore_patterns=["*/*"]))
    except HFValidationError as error:  # a path; an unknown hub name raises OSError
        raise FileNotFoundError(f"{source} is neither a folder nor a name of a model on the hub") from error


def described_files(
    folder: Path,
    model_class: type[PreTrainedModel] | None = None,
    dtype: torch.dtype = torch.float32,
    attention: str | None = None,
) -> DescribedFiles:
    """Loads tensors without values into the model of `folder`; see `stored_model`."""
    tensors = stored_tensors(folder)
    state = {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors.items()}
    model, info = described_model(str(folder), state, model_class, dtype, attention)
    pushed = checkpoint_names(model)
    copies = _copies(model, pushed)
    return DescribedFiles(model, info, tensors, pushed, _names(model, pushed, copies, tensors), copies)


def stored_model(folder: Path, model_class: type[PreTrainedModel] | None = None) -> StoredModel:
    """Compares the files of `folder` with the model of its config.json, by loading tensors without values.

    `model_class` replaces the class of a policy.
    """
    described = described_files(folder, model_class)
    model, info, tensors, pushed = described.model, described.info, described.tensors, described.pushed
    names, copies = described.names, described.copies
    spare = {*names, *(name for name in tensors if not name.startswith(checkpoint_prefix(model.config)))}
    shapes = {pushed[n]: as_stored(model, n, tensor).shape for n, tensor in model.state_dict().items() if n in pushed}
    return StoredModel(
        manifest=Manifest(tuple(TensorSpec(name, tuple(shape), "float32") for name, shape in sorted(shapes.items()))),
        names=names,
        tensors=tensors,
        left_out=tuple(sorted(set(info["unexpected_keys"]) - spare)),
        missing=tuple(sorted(pushed.get(name, name) for name in info["missing_keys"])),
        misshapen=tuple(f"{n} is {list(a)}, {list(b)} by config.json" for n, a, b in sorted(info["mismatched_keys"])),
        ties=_ties(copies, names, tensors),
        copies=copies,
    )


def pushed_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields (name in a push, tensor) for every tensor of the model in `folder`, in the dtype of its file."""
    if any(file.name.startswith("diffusion_") for file in checkpoint_files(folder)):  # files use state-dict names
        names: Mapping[str, str] = {name: name for name in stored_tensors(folder)}
    else:
        names = stored_model(folder).names
    yield from ((names[name], tensor) for name, tensor in _read(folder, names))


def loaded_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """As `pushed_tensors`; also yields tied tensors under the names of their copies."""
    copies = stored_model(folder).copies
    for name, tensor in pushed_tensors(folder):
        yield name, tensor
        yield from ((copy, tensor) for copy, source in copies.items() if source == name)


def _copies(model: PreTrainedModel, pushed: Mapping[str, str]) -> dict[str, str]:
    """Returns file name of the copy of a tied tensor -> the tensor's name in a push."""
    state = model.state_dict()
    ties = model.all_tied_weights_keys.items()
    return {saved_names(model, copy, state[copy])[0]: pushed[source] for copy, source in ties if source in pushed}


def _names(
    model: PreTrainedModel, pushed: Mapping[str, str], copies: Mapping[str, str], tensors: Mapping[str, StoredTensor]
) -> dict[str, str]:
    """Returns name in the files -> name in a push. They differ in the base model's prefix and in the side of a tie.

    Files may hold both sides of a tie. The model has one tensor, so the other side is not pushed.
    """
    wanted = {name: name for name in pushed.values()}
    prefix = f"{model.base_model_prefix}."
    for name in pushed.values():
        for other in (name.removeprefix(prefix), prefix + name):
            wanted.setdefault(other, name)
    for copy, name in copies.items():
        wanted.setdefault(copy, name)
    found: dict[str, str] = {}
    for name in sorted(tensors, key=lambda name: wanted.get(name) != name):  # exact names first
        if name in wanted and wanted[name] not in found.values():
            found[name] = wanted[name]
    return found


def _ties(copies: Mapping[str, str], names: Mapping[str, str], tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    own = {name: file_name for file_name, name in names.items()}
    return {copy: own[name] for copy, name in copies.items() if copy in tensors and own.get(name, copy) != copy}


def broken_ties(folder: Path, stored: StoredModel) -> list[tuple[str, str]]:
    """Returns the ties whose tensors differ. transformers loads them as two tensors; engines follow config.json."""
    if not stored.ties:
        return []
    wanted = {*stored.ties, *stored.ties.values()}
    found = dict(_read(folder, wanted))
    return [(copy, source) for copy, source in stored.ties.items() if not torch.equal(found[copy], found[source])]


def _read(folder: Path, wanted: Container[str]) -> Iterator[tuple[str, Tensor]]:
    for file in checkpoint_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                if name in wanted:
                    yield name, tensors.get_tensor(name)


EXPERTS = ".experts."


def pushed_manifest(checkpoint: Manifest, config: RunConfig) -> Manifest:
    """Returns the manifest of a push of weights: `checkpoint` without frozen tensors (`policy.freeze`), which the
    engines already have.

    vLLM loads q, k and v, gate and up, or all experts of a block as one layer: a frozen tensor is sent if another
    tensor of the same parent module is trained. At `resources.sleep_level` 2 engines discard their weights, so all
    tensors are sent.
    """
    payload: Payload = "delta" if config.weight_sync.payload == "delta" else "weights"
    frozen = frozen_prefixes(config.policy)
    if not frozen or (config.resources.colocated and config.resources.sleep_level == 2):
        return replace(checkpoint, payload=payload)
    trained = {_parent(spec.name) for spec in checkpoint.tensors if not spec.name.startswith(frozen)}
    return Manifest(tuple(spec for spec in checkpoint.tensors if _parent(spec.name) in trained), payload)


def _parent(name: str) -> str:
    """Returns the module whose children vLLM may load as one layer."""
    block, experts, _ = name.partition(EXPERTS)
    return block + experts if experts else name.rsplit(".", 2)[0]
