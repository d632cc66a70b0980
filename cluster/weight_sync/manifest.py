"""The manifest: which tensors a push carries, in which order, and how they are packed into buckets.

Names are the checkpoint's own (what is in the safetensors files), never those of one library's modules. The receiver
compares the sender's manifest with what its own checkpoint promises; a difference refuses the push before a byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open

from cluster.errors import ManifestError, PreflightError

ALIGNMENT_BYTES = 16
ALONE_BYTES = 4 << 20
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


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
    """Everything one push carries, in order."""

    tensors: tuple[TensorSpec, ...]

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.tensors)

    def check_against(self, expected: Manifest) -> None:
        """Compare by name, shape and dtype; order is the sender's.

        Raises:
            ManifestError: names what is missing, unexpected or different.
        """
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

    def below(self, prefix: str) -> Manifest:
        """The tensors whose names begin with `prefix`."""
        return Manifest(tuple(spec for spec in self.tensors if spec.name.startswith(prefix)))

    def buckets(self, max_bytes: int) -> Iterator[Bucket]:
        """Pack in order; a bucket exceeds `max_bytes` only if a single tensor does.

        A tensor of `ALONE_BYTES` or more is a bucket by itself: it can travel from the sender's memory into the
        receiver's without a copy on either side.
        """
        slots: list[Slot] = []
        end = 0
        for spec in self.tensors:
            start = _align(end)
            is_full = start + spec.num_bytes > max_bytes
            if slots and (is_full or ALONE_BYTES <= max(spec.num_bytes, slots[-1].spec.num_bytes)):
                yield Bucket(tuple(slots), end)
                slots, start = [], 0
            slots.append(Slot(spec, start))
            end = start + spec.num_bytes
        if slots:
            yield Bucket(tuple(slots), end)

    def to_wire(self) -> list[dict[str, object]]:
        """Plain lists and strings, for serializers that know nothing else."""
        return [dict(vars(spec)) for spec in self.tensors]

    @classmethod
    def from_wire(cls, wire: Sequence[Mapping[str, object]]) -> Manifest:
        return cls(tuple(TensorSpec(str(w["name"]), tuple(w["shape"]), str(w["dtype"])) for w in wire))  # type: ignore[arg-type]


def checkpoint_manifest(folder: Path, dtype: str) -> Manifest:
    """Manifest of a checkpoint folder, read from its safetensors headers alone, as tensors of `dtype`.

    Raises:
        PreflightError: the folder holds no safetensors file, or one that is cut off or damaged.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise PreflightError(
            f"{folder} holds no safetensors file, which weight sync reads the checkpoint's tensor names from: "
            "download or write the checkpoint again in that format"
        )
    specs = [TensorSpec(name, shape, dtype) for file in files for name, shape in _shapes(file).items()]
    return Manifest(tuple(sorted(specs, key=lambda spec: spec.name)))


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a safetensors file's tensors; opening it compares its header with its length."""
    try:
        with safe_open(file, framework="numpy") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
    except (OSError, SafetensorError) as error:
        raise PreflightError(f"{file} is no whole safetensors file ({error}): download or write it again") from error


def _align(offset: int) -> int:
    return (offset + ALIGNMENT_BYTES - 1) // ALIGNMENT_BYTES * ALIGNMENT_BYTES


def _describe(spec: TensorSpec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"
