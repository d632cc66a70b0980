"""Files of a checkpoint: what they hold, reading into a model, and saving."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import EllipsisType
from typing import Any, BinaryIO, Protocol

import torch
from huggingface_hub import snapshot_download, split_torch_state_dict_into_shards
from huggingface_hub.errors import HFValidationError
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils import swap_tensors
from transformers import GenerationConfig, PreTrainedModel

from mobula.cluster.runtime.gc_tuning import return_free_memory
from mobula.cluster.weight_sync.manifest import (
    Manifest,
    Payload,
    StoredTensor,
    TensorSpec,
    checkpoint_files,
    name_prefix,
    stored_tensors,
)
from mobula.configs.schema import PolicyConfig, RunConfig
from mobula.learner.policies.attention.packed import pack_windows, refuse_without_package
from mobula.learner.policies.families import checkpoint_prefix, frozen_prefixes, own_family
from mobula.learner.policies.loading import (
    as_stored,
    checkpoint_names,
    described_model,
    disable_dropout,
    freeze,
    saved_names,
)
from mobula.learner.policies.quantised import quantised_layers

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
    found = dict(_read(folder, {*stored.ties, *stored.ties.values()}))
    return [(copy, source) for copy, source in stored.ties.items() if not torch.equal(found[copy], found[source])]


def _read(folder: Path, wanted: Container[str]) -> Iterator[tuple[str, Tensor]]:
    for file in checkpoint_files(folder):
        prefix = name_prefix(folder, file)
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                if f"{prefix}{name}" in wanted:
                    yield f"{prefix}{name}", tensors.get_tensor(name)


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
    block, experts, _ = name.partition(EXPERTS)
    return block + experts if experts else name.rsplit(".", 2)[0]


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
            prefix = name_prefix(self.folder, file)
            # `pread` and not `mmap`: mapped pages would count as memory of this process.
            with safe_open(file, framework="pt", backend="pread") as tensors:
                for key in tensors.keys():
                    if (name := self.names.get(f"{prefix}{key}")) is not None:
                        yield name, _StoredRows(self.model, name, tensors.get_slice(key))


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
    # Buffers are computed on the CPU, as `from_pretrained` does: most are in no file. Parameters stay without values.
    for buffer in model.buffers():
        swap_tensors(buffer, torch.empty_like(buffer, device=CPU))
    for module in model.modules():
        vars(module).pop("_is_hf_initialized", None)  # set when the buffers had no values
    model.initialize_weights()
    pack_windows(model)
    states = {name: state for state, name in described.pushed.items()}
    names = {file_name: states[name] for file_name, name in described.names.items()}
    return model, StoredWeights(folder, names, model)


@torch.no_grad()
def fill(model: nn.Module, weights: Weights, device: torch.device) -> None:
    """Allocates the parameters on the meta device on `device` and copies this rank's rows into them.

    Not collective. Parameters with values keep them if `weights` lacks them.
    """
    lacking = allocate(model, device)
    quantised = {plain_name(name): layer for name, layer in quantised_layers(model).items()}
    state = {plain_name(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    for name, rows in weights:
        if name in quantised:  # whole on each rank, and one at a time in more bits
            quantised[name].take(rows[...], device)
            return_free_memory()  # glibc keeps what quantising one weight took, and adds it up
        elif name in state:
            _copy(state[name], rows)
            lacking.discard(state[name])
    refuse_lacking(model, lacking | {layer.weight for layer in quantised.values() if not layer.is_filled})


def plain_name(name: str) -> str:
    """Returns the state-dict name of a weight in the model without adapters."""
    return name.replace(BASE, ".")


def allocate(model: nn.Module, device: torch.device) -> set[Tensor]:
    """Allocates the parameters on the meta device on `device` and returns them."""
    held = {layer.weight for layer in quantised_layers(model).values()}  # have no memory before their values
    empty: set[Tensor] = {p for p in model.parameters() if p.device.type == "meta" and p not in held}
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


DTYPES = {  # in the write order of safetensors, which aligns every tensor
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

RANKS = {dtype: rank for rank, dtype in enumerate(DTYPES)}

ALIGNMENT = 8  # bytes


def write_weights(
    folder: Path,
    stem: str,
    described: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
    max_file_size: str,
    networks: Sequence[str] = ("",),
) -> None:
    """Writes `STEM.safetensors`, or several files and their index, byte for byte as `save_pretrained` does.

    Args:
        described: name -> tensor on the meta device, with the shape and dtype to write.
        tensors: (name, tensor) of every entry of `described`, in any order.
        max_file_size: in the format of huggingface_hub, such as 50GB.
        networks: subfolders of networks that are one model; their names begin with `NETWORK.`.
    """
    pattern = f"{stem}{{suffix}}.safetensors"
    with ExitStack() as stack:
        offsets: dict[str, tuple[BinaryIO, int]] = {}
        for network in networks:
            prefix = network and f"{network}."
            own = {name.removeprefix(prefix): tensor for name, tensor in described.items() if name.startswith(prefix)}
            split = split_torch_state_dict_into_shards(own, filename_pattern=pattern, max_shard_size=max_file_size)
            for name, keys in split.filename_to_tensors.items():
                file = stack.enter_context((folder / network / name).open("wb"))
                offsets |= {f"{prefix}{key}": (file, offset) for key, offset in write_header(file, own, keys).items()}
            if split.is_sharded:
                metadata = {"total_parameters": sum(tensor.numel() for tensor in own.values()), **split.metadata}
                index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
                text = json.dumps(index, indent=2, sort_keys=True) + "\n"
                (folder / network / f"{stem}.safetensors.index.json").write_text(text, encoding="utf-8")
        for key, tensor in tensors:
            target, offset = offsets.pop(key)
            assert (tensor.shape, tensor.dtype) == (described[key].shape, described[key].dtype), key
            target.seek(offset)
            target.write(content(tensor))
        if offsets:
            raise ValueError(f"{folder} lacks {len(offsets)} tensors, such as {next(iter(offsets))}")


def content(tensor: Tensor) -> memoryview:
    """Returns the bytes of a tensor; of a contiguous one in host memory without a copy."""
    return tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data


def write_header(file: BinaryIO, described: Mapping[str, Tensor], keys: Sequence[str]) -> dict[str, int]:
    """Writes the header of a file with these tensors; returns the offset of each tensor in the file."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins, end = {}, 0
    for key in sorted(keys, key=lambda key: (RANKS[described[key].dtype], key)):
        tensor = described[key]
        begins[key], end = end, end + tensor.nbytes
        header[key] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begins[key], end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)
    file.truncate(8 + len(text) + end)
    return {key: 8 + len(text) + begin for key, begin in begins.items()}


CONFIG_FILE = "config.json"

TEMPLATES_FOLDER = "additional_chat_templates"

WEIGHTS_STEM, MAX_FILE_SIZE = "model", "50GB"  # as in transformers

WEIGHT_SUFFIXES = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
)


def save_policy(
    model: PreTrainedModel,
    source: str,
    folder: Path,
    described: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
    dtype: str = "",
) -> None:
    """Writes a checkpoint that transformers and vLLM load like `source`, and copies the other files of `source`.

    Each tensor keeps its dtype in `source`; config.json names the dtype of most values. One tensor is held at a time.

    Args:
        source: `policy.model`.
        described: state-dict name -> tensor with the shape of the whole tensor; values are not read.
        tensors: (state-dict name, whole tensor) of each.
        dtype: dtype of all tensors; empty: each tensor keeps its dtype.
    """
    folder.mkdir(parents=True, exist_ok=True)
    original = checkpoint_folder(source)
    dtypes, names = SavedDtypes.of_model(original, dtype), checkpoint_names(model, described)
    files = {names[n]: dtypes.described(names[n], as_stored(model, n, t)) for n, t in described.items() if n in names}
    cast = ((names[n], dtypes.cast(names[n], as_stored(model, n, t))) for n, t in tensors if n in names)
    write_weights(folder, WEIGHTS_STEM, files, cast, MAX_FILE_SIZE)
    if checkpoint_prefix(model.config):
        shutil.copy2(original / CONFIG_FILE, folder / CONFIG_FILE)
    else:
        model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
        model.config.save_pretrained(folder)
    for file in original.iterdir():  # tokenizer, processor, generation_config.json, model card and code
        if file.is_file() and file.name != CONFIG_FILE and not file.name.endswith(WEIGHT_SUFFIXES):
            shutil.copy2(file, folder / file.name)
    family = own_family(model.config)
    for name in (TEMPLATES_FOLDER, *(family.folders if family else ())):
        if (original / name).is_dir():
            shutil.copytree(original / name, folder / name, dirs_exist_ok=True)
    settings = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    # Without a `dtype`, parts of the configuration keep their dtypes.
    before = {} if dtype else json.loads((original / CONFIG_FILE).read_text(encoding="utf-8"))
    _set_dtype(settings, str(dtypes.main).removeprefix("torch."), before)
    settings[_dtype_key(settings)] = str(dtypes.main).removeprefix("torch.")
    (folder / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _set_dtype(settings: dict[str, Any], dtype: str, before: Mapping[str, Any]) -> None:
    for key, part in settings.items():
        if isinstance(part, dict) and key.endswith("_config"):
            _set_dtype(part, dtype, before.get(key) or {})
            if (name := _dtype_key(part)) in part:
                part[name] = before.get(key, {}).get(name) or dtype


def _dtype_key(settings: Mapping[str, Any]) -> str:
    """`dtype`, or `torch_dtype` in files of transformers 4."""
    return "torch_dtype" if "torch_dtype" in settings and "dtype" not in settings else "dtype"
