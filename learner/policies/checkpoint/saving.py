"""Writes checkpoints tensor by tensor, so that a process holds one tensor at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from transformers import PreTrainedModel

from mobula.learner.policies.checkpoint.stored import SavedDtypes, checkpoint_folder
from mobula.learner.policies.families import checkpoint_prefix
from mobula.learner.policies.loading import as_stored, checkpoint_names

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
    folder: Path, stem: str, described: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]], max_file_size: str
) -> None:
    """Writes `STEM.safetensors`, or several files and their index, byte for byte as `save_pretrained` does.

    Args:
        described: name -> tensor on the meta device, with the shape and dtype to write.
        tensors: (name, tensor) of every entry of `described`, in any order.
        max_file_size: in the format of huggingface_hub, such as 50GB.
    """
    pattern = f"{stem}{{suffix}}.safetensors"
    split = split_torch_state_dict_into_shards(dict(described), filename_pattern=pattern, max_shard_size=max_file_size)
    with ExitStack() as stack:
        offsets: dict[str, tuple[BinaryIO, int]] = {}
        for name, keys in split.filename_to_tensors.items():
            file = stack.enter_context((folder / name).open("wb"))
            offsets |= {key: (file, offset) for key, offset in write_header(file, described, keys).items()}
        for key, tensor in tensors:
            target, offset = offsets.pop(key)
            assert (tensor.shape, tensor.dtype) == (described[key].shape, described[key].dtype), key
            target.seek(offset)
            target.write(content(tensor))
        if offsets:
            raise ValueError(f"{folder} lacks {len(offsets)} tensors, such as {next(iter(offsets))}")
    if split.is_sharded:
        metadata = {"total_parameters": sum(tensor.numel() for tensor in described.values()), **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / f"{stem}.safetensors.index.json").write_text(text, encoding="utf-8")


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
    _copy_other_files(original, folder)
    _write_dtype(original, folder, dtypes, keeps_parts=not dtype)


def _copy_other_files(original: Path, folder: Path) -> None:
    """Copies tokenizer, processor, chat templates, generation_config.json, model card and code."""
    for file in original.iterdir():
        if file.is_file() and file.name != CONFIG_FILE and not file.name.endswith(WEIGHT_SUFFIXES):
            shutil.copy2(file, folder / file.name)
    if (original / TEMPLATES_FOLDER).is_dir():
        shutil.copytree(original / TEMPLATES_FOLDER, folder / TEMPLATES_FOLDER, dirs_exist_ok=True)


def _write_dtype(original: Path, folder: Path, dtypes: SavedDtypes, *, keeps_parts: bool) -> None:
    """Writes the main dtype to config.json; with `keeps_parts`, parts of the configuration keep their dtypes."""
    settings = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    before = json.loads((original / CONFIG_FILE).read_text(encoding="utf-8")) if keeps_parts else {}
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
