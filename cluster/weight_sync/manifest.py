"""The manifest: the tensors of a push, their order, how they are packed into buckets, and the payload.

Names are those of the checkpoint (of the safetensors files), never those of one library's modules. The receiver
compares the sender's manifest with its own checkpoint; a difference refuses the push before the first byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple, dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from mobula.cluster.errors import ManifestError, PreflightError

ALIGNMENT_BYTES = 16
ALONE_BYTES = 4 << 20
# The first existing file is loaded: transformers prefers the single file over the index, diffusers the index.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
)
NETWORKS = ("transformer", "transformer_2")  # folders of a pipeline whose two networks are trained as one model
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

Payload = Literal["weights", "adapters", "delta"]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor by its checkpoint name."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Slot:
    """Position of one tensor in its bucket: bytes [offset, offset + spec.num_bytes)."""

    spec: TensorSpec
    offset: int


@dataclass(frozen=True)
class Bucket:
    """Tensors that are sent in one piece."""

    slots: tuple[Slot, ...]
    num_bytes: int


@dataclass(frozen=True)
class Manifest:
    """The tensors of one push, in order. A push of payload `delta` has the elements that changed since `base_version`,
    or whole tensors where that is None."""

    tensors: tuple[TensorSpec, ...]
    payload: Payload = "weights"
    base_version: int | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensors."""
        return sum(spec.num_bytes for spec in self.tensors)

    @property
    def num_elements(self) -> int:
        return sum(prod(spec.shape) for spec in self.tensors)

    @property
    def sha256(self) -> str:
        """Digest of payload, names, shapes and dtypes, in order."""
        return hashlib.sha256(json.dumps([self.payload, [astuple(spec) for spec in self.tensors]]).encode()).hexdigest()

    def check_against(self, expected: Manifest) -> None:
        """Compares the payload, and tensors by name, shape and dtype; the order may differ."""
        if self.payload != expected.payload:
            raise ManifestError(
                f"the push has the payload {self.payload}, and the engine was started for {expected.payload} "
                "(weight_sync.payload): start learner and engines with one configuration. No byte was sent"
            )
        ours = {spec.name: spec for spec in self.tensors}
        theirs = {spec.name: spec for spec in expected.tensors}
        problems = [f"missing {name}" for name in sorted(theirs.keys() - ours.keys())]
        problems += [f"unexpected {name}" for name in sorted(ours.keys() - theirs.keys())]
        problems += [
            f"{name} is {_describe(ours[name])} but {_describe(theirs[name])} is expected"
            for name in sorted(ours.keys() & theirs.keys())
            if ours[name] != theirs[name]
        ]
        if len(ours) != len(self.tensors):
            problems.append("some name occurs twice")
        if problems:
            shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
            raise ManifestError(f"the push does not fit the engine's checkpoint: {shown}. No byte was sent")

    def buckets(self, max_bytes: int) -> Iterator[Bucket]:
        """Packs in order; a bucket exceeds `max_bytes` only if a single tensor does.

        A tensor of `ALONE_BYTES` or more has its own bucket: it can be sent from the sender's memory into the
        receiver's without a copy on either side.
        """
        slots: list[Slot] = []
        end = 0
        for spec in self.tensors:
            start = align(end)
            is_full = start + spec.num_bytes > max_bytes
            if slots and (is_full or ALONE_BYTES <= max(spec.num_bytes, slots[-1].spec.num_bytes)):
                yield Bucket(tuple(slots), end)
                slots, start = [], 0
            slots.append(Slot(spec, start))
            end = start + spec.num_bytes
        if slots:
            yield Bucket(tuple(slots), end)

    def to_wire(self) -> dict[str, Any]:
        """Plain dictionaries, lists and strings, for serializers that support nothing else."""
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Manifest:
        specs = (TensorSpec(spec["name"], tuple(spec["shape"]), spec["dtype"]) for spec in wire["tensors"])
        return cls(tuple(specs), wire["payload"], wire["base_version"])


@dataclass(frozen=True)
class StoredTensor:
    """Shape and dtype of a tensor in a file; `dtype` as safetensors writes it, such as F32."""

    shape: tuple[int, ...]
    dtype: str


def checkpoint_manifest(folder: Path, dtype: str) -> Manifest:
    """Returns the manifest of a checkpoint directory, read from its safetensors headers, as tensors of `dtype`."""
    specs = [TensorSpec(name, tensor.shape, dtype) for name, tensor in stored_tensors(folder).items()]
    return Manifest(tuple(sorted(specs, key=lambda spec: spec.name)))


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Returns name -> tensor; names of a pipeline with two networks begin with their folder."""
    files = {file: name_prefix(folder, file) for file in checkpoint_files(folder)}
    return {f"{prefix}{name}": tensor for file, prefix in files.items() for name, tensor in _header(file).items()}


def checkpoint_files(folder: Path) -> list[Path]:
    """Returns the weight files that transformers or diffusers loads. Other files in the directory (of another format
    or an earlier save, adapters) are not part of the model. Of a pipeline, returns the files of both networks."""
    if all((folder / name).is_dir() for name in NETWORKS):
        return [file for name in NETWORKS for file in checkpoint_files(folder / name)]
    first = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)
    if first is None:
        raise PreflightError(
            f"{folder} holds no safetensors file of weights ({WEIGHT_FILES[0]}, or {WEIGHT_FILES[1]} with its shards): "
            "download or write the checkpoint again in that format"
        )
    if first.suffix != ".json":
        return [first]
    try:
        shards = sorted(set(json.loads(first.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise PreflightError(f"{first} is no index of weights ({error!r}): download or write it again") from error
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise PreflightError(
            f"{first} names {missing[0]} and {len(missing) - 1} more files that the folder does not have: download them"
        )
    return [folder / shard for shard in shards]


def name_prefix(folder: Path, file: Path) -> str:
    """Returns the prefix of the names in `file`, one of the weight files of `folder`."""
    return "" if file.parent == folder else f"{file.parent.name}."


def _header(file: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a safetensors file; opening it compares its header with its length."""
    try:
        with safe_open(file, framework="numpy") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}
            return {name: StoredTensor(tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise PreflightError(f"{file} is no whole safetensors file ({error}): download or write it again") from error


def align(offset: int) -> int:
    """Returns the first position from `offset` on at which a tensor may begin."""
    return (offset + ALIGNMENT_BYTES - 1) // ALIGNMENT_BYTES * ALIGNMENT_BYTES


def _describe(spec: TensorSpec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"
