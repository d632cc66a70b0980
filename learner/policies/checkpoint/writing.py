"""Writes safetensors files tensor by tensor, so that a process holds one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

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
        header[key] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begins[key], end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)
    file.truncate(8 + len(text) + end)
    return {key: 8 + len(text) + begin for key, begin in begins.items()}
