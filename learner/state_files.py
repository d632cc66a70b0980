"""A state of tensors and plain values in a folder: one safetensors file of each rank, and an index in JSON."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, LoadPlan, LoadPlanner, SavePlan
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mobula.cluster.errors import CheckpointError
from mobula.cluster.files import flush, write_atomically
from mobula.learner.policies.checkpoint import DTYPES, content, write_header

INDEX = "state.json"  # written last
EARLIER_INDEX = ".metadata"  # a pickle, of earlier versions: torch's distributed format
TORCH_TYPES = {name: dtype for dtype, name in DTYPES.items()}
EARLIER_CLASSES = {
    "pathlib": {"PosixPath"},
    "torch": {"Size"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
}  # fmt: skip
Chunk = tuple[list[int], list[int], Any]  # offsets and sizes of a part of a tensor, and where it is stored


def write_state(state: Mapping[str, Any], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Writes a state of tensors, sharded or whole, and JSON values. Collective in `group`; without one, this process
    alone writes."""
    for name, value in flatten_state_dict(dict(state))[0].items():
        _refuse_unwritable(name, value)
    with _failing_as(OSError, folder):
        dcp.save(
            dict(state),
            storage_writer=_Writer(folder),
            planner=_SavePlanner(),
            process_group=group,
            no_dist=group is None,
        )


def read_state(state: dict[str, Any], folder: Path, index: Metadata | None = None, *, no_dist: bool = False) -> None:
    """Fills `state` with what was written, by any number of ranks: tensors in place, values replaced. Collective.

    The optimizer's state of weights that no gradient has reached may be missing, and keeps its values: the last block
    of some flow models computes a text that nothing reads.

    Args:
        index: the result of `read_index`, for many reads of one folder.
        no_dist: this process reads alone.
    """
    reader = _Reader(folder, index or read_index(folder))
    with _failing_as(CheckpointError, folder):
        dcp.load(state, storage_reader=reader, planner=_LoadPlanner(), no_dist=no_dist or not dist.is_initialized())


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds a state."""
    return any((folder / name).is_file() for name in (INDEX, EARLIER_INDEX))


def read_index(folder: Path) -> Metadata:
    """Reads which tensors and values a state holds."""
    if not is_complete(folder):
        raise CheckpointError(f"{folder} holds no complete learner state: use an older checkpoint")
    file = folder / (INDEX if (folder / INDEX).is_file() else EARLIER_INDEX)
    try:
        return _parsed(file.read_bytes()) if file.name == INDEX else _parsed_earlier(file.read_bytes())
    except (ValueError, LookupError, TypeError, AttributeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{file} is refused: {error}: use another checkpoint") from error


def load_plain(file: Path, *, mmap: bool = False) -> Any:
    """Reads a file of `torch.save` that holds tensors and plain values, into host memory."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{file} is refused: {str(error).splitlines()[0]}: use another checkpoint") from error


class _SavePlanner(DefaultSavePlanner):
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Passes values on: they stand in the index."""
        return object


class _Writer(dcp.FileSystemWriter):
    """Writes a safetensors file of each rank with the plans of torch's distributed checkpoints."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"rank_{plan.storage_data.prefix.strip('_')}.safetensors"
        items = {_key(item.index): item for item in plan.items if item.type != WriteItemType.BYTE_IO}
        described = {}
        for key, item in items.items():
            assert item.tensor_data is not None, "an item of a tensor describes it"
            dtype = item.tensor_data.properties.dtype
            described[key] = torch.empty(item.tensor_data.chunk.sizes, dtype=dtype, device="meta")
        with (Path(self.path) / name).open("wb") as file:
            for key, offset in write_header(file, described, list(described)).items():
                file.seek(offset)
                data = planner.resolve_data(items[key])
                assert isinstance(data, torch.Tensor), "bytes are values of the index"
                file.write(content(data))
            flush(file)
        results = [WriteResult(item.index, described[key].nbytes, name) for key, item in items.items()]
        values = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        future: Future[list[WriteResult]] = Future()
        future.set_result([*results, *(WriteResult(item.index, 0, planner.resolve_data(item)) for item in values)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for rank in results for result in rank}
        tensors, values = {}, {}
        for name, saved in metadata.state_dict_metadata.items():
            if isinstance(saved, TensorStorageMetadata):
                parts = [(list(chunk.offsets), list(chunk.sizes)) for chunk in saved.chunks]
                chunks = [(*part, places[MetadataIndex(name, part[0])]) for part in parts]
                tensors[name] = {"dtype": DTYPES[saved.properties.dtype], "shape": list(saved.size), "chunks": chunks}
            else:
                values[name] = places[MetadataIndex(name)]
        write_atomically(Path(self.path) / INDEX, json.dumps({"tensors": tensors, "values": values}))


class _Reader(dcp.FileSystemReader):
    """Reads a state with an index that was read before, of this version or an earlier one."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if any(isinstance(place, _StorageInfo) for place in self.storage_data.values()):
            return super().read_data(plan, planner)  # loads tensors with weights_only=True

        def place(item: ReadItem) -> Any:
            return self.storage_data[item.storage_index]

        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, place(item))
        tensors = [item for item in plan.items if item.type == LoadItemType.TENSOR]
        for name, items in groupby(sorted(tensors, key=place), place):
            # `pread` and not `mmap`: mapped pages would count as memory of this process.
            with safe_open(Path(self.path) / name, framework="pt", backend="pread") as file:
                for item in items:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(_part(file, item))
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future


class _LoadPlanner(DefaultLoadPlanner):
    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None and self.state_dict is not None, "the planner has been set up"
        lacking = [key for key in self.state_dict if key not in self.metadata.state_dict_metadata]
        self.allow_partial_load = all(key.startswith("optimizer.state.") for key in lacking)
        return super().create_local_plan()

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Takes a value of the index, or of an earlier version a file of `torch.save`."""
        if isinstance(value, io.BytesIO):
            value = torch.load(value, weights_only=True)
        name = read_item.dest_index.fqn
        if isinstance(self.state_dict[name], tuple):
            value = tuple(value)
        *path, last = self.mappings[name]
        target: Any = self.original_state_dict
        for key in path:
            target = target[key]
        target[last] = value


class _Record:
    """Stands for an object of an earlier index: it keeps what the object was made of, and does nothing."""

    state: Any = None

    def __init__(self, *parts: object) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _EarlierIndex(pickle.Unpickler):
    """Reads an index of torch's distributed format. No class of the file is made and no function called: each stands
    for a `_Record`, and names that such an index does not need are refused."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if name not in EARLIER_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of a checkpoint needs")
        return tuple if name == "Size" else _Record


def _parsed(text: bytes) -> Metadata:
    found = json.loads(text)
    tensors: dict[str, tuple[torch.dtype, list[int], list[Chunk]]] = {}
    for name, saved in found["tensors"].items():
        chunks = [(offsets, sizes, _plain_file(file)) for offsets, sizes, file in saved["chunks"]]
        tensors[name] = (TORCH_TYPES[saved["dtype"]], saved["shape"], chunks)
    return _index(tensors, found["values"])


def _parsed_earlier(pickled: bytes) -> Metadata:
    found = _EarlierIndex(io.BytesIO(pickled)).load().state
    places = {(key.state["fqn"], key.state.get("offset")): place.state for key, place in found["storage_data"].items()}
    tensors: dict[str, tuple[torch.dtype, list[int], list[Chunk]]] = {}
    values = {}
    for name, entry in found["state_dict_metadata"].items():
        if entry.state is None:
            values[name] = _earlier_place(places[name, None])
            continue
        parts = [(chunk.state["offsets"], chunk.state["sizes"]) for chunk in entry.state["chunks"]]
        chunks = [(offsets, sizes, _earlier_place(places[name, offsets])) for offsets, sizes in parts]
        tensors[name] = (entry.state["properties"].state[0], entry.state["size"], chunks)
    return _index(tensors, values)


def _earlier_place(place: Mapping[str, Any]) -> _StorageInfo:
    return _StorageInfo(_plain_file(place["relative_path"]), int(place["offset"]), int(place["length"]))


def _index(tensors: Mapping[str, tuple[torch.dtype, list[int], list[Chunk]]], values: Mapping[str, Any]) -> Metadata:
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places = {MetadataIndex(name): value for name, value in values.items()}
    for name, (dtype, shape, chunks) in tensors.items():
        parts = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes, _ in chunks]
        described[name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), parts)
        places |= {MetadataIndex(name, offsets): place for offsets, _, place in chunks}
    return Metadata({**described, **{name: BytesStorageMetadata() for name in values}}, storage_data=places)


def _plain_file(name: str) -> str:
    if Path(name).name != name:
        raise ValueError(f"it names {name!r}, which is not a file of its folder")
    return name


def _key(index: MetadataIndex) -> str:
    """The name in a file of the part of a tensor at these offsets."""
    return f"{index.fqn}@{','.join(map(str, index.offset or ()))}"


def _part(file: Any, item: ReadItem) -> Tensor:
    stored = file.get_slice(_key(item.storage_index))
    if list(item.lengths) == stored.get_shape():
        return file.get_tensor(_key(item.storage_index))
    return stored[tuple(slice(at, at + n) for at, n in zip(item.storage_offsets, item.lengths, strict=True))]


def _refuse_unwritable(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name} of the state is {value!r}, and a checkpoint holds tensors and JSON") from error
    elif value.dtype not in DTYPES:
        raise ValueError(f"{name} of the state has the type {value.dtype}, which no checkpoint holds: use another type")


@contextmanager
def _failing_as(error: type[OSError | CheckpointError], folder: Path) -> Iterator[None]:
    """Raises `error` in place of torch's, which is no Exception and which all ranks raise."""
    try:
        yield
    except CheckpointException as failure:
        rank, (cause, _) = next(iter(failure.failures.items()))
        raise error(f"{folder}: rank {rank}: {cause}") from failure
