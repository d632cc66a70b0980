"""What FSDP2 and DeepSpeed share: process group, gathering and sharded state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves

from mobula.cluster.weight_sync.transport import RendezvousStore, join_store
from mobula.configs.schema import RunConfig
from mobula.learner.policies.base import Policy
from mobula.learner.state_files import read_index, read_state, write_state

BUCKET_BYTES = 64 << 20  # of whole tensors in one exchange; bounds the memory that gathering takes


def gather_whole(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `state`, in order, each one whole. Collective: every rank must run it to the end."""
    bucket: dict[str, Tensor] = {}
    num_bytes, dtype = 0, None
    for name, tensor in state.items():
        num_bytes += tensor.nbytes
        if bucket and (num_bytes > BUCKET_BYTES or tensor.dtype != dtype):
            yield from _gather_bucket(bucket)
            bucket, num_bytes = {}, tensor.nbytes
        bucket[name], dtype = tensor, tensor.dtype
    yield from _gather_bucket(bucket)


def _gather_bucket(bucket: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    sharded = [t for t in bucket.values() if isinstance(t, DTensor)]
    whole = iter(_gather(sharded) if sharded else ())
    for name, tensor in bucket.items():
        yield name, next(whole) if isinstance(tensor, DTensor) else tensor


def _gather(tensors: list[DTensor]) -> list[Tensor]:
    """One all-gather of all local shards (of one rank: none), within the replica. Its first rank holds the largest of
    each tensor, so its sum is the widest."""
    assert all(t.placements[-1] == Shard(0) for t in tensors), "FSDP2 shards the first dimension"
    group = tensors[0].device_mesh.get_group(-1)
    num_ranks = dist.get_world_size(group)
    if num_ranks == 1:
        return [t.to_local() for t in tensors]
    shapes = [[_local_shape(t, rank, num_ranks) for t in tensors] for rank in range(num_ranks)]
    width = sum(shape.numel() for shape in shapes[0])
    # One collective for many tensors: small ones cost their latency, not their bytes.
    flat = torch.cat([t.to_local().reshape(-1) for t in tensors])
    gathered = flat.new_empty(num_ranks * width)
    dist.all_gather_single(gathered, torch.nn.functional.pad(flat, (0, width - flat.numel())), group)
    if len(tensors) == 1:  # its rows lie in order already, and it may be larger than a bucket: no copy
        return [gathered[: tensors[0].numel()].view(tensors[0].shape)]
    parts = [_split(gathered[rank * width :], shapes[rank]) for rank in range(num_ranks)]
    return [torch.cat(pieces) for pieces in zip(*parts, strict=True)]


def _local_shape(tensor: DTensor, rank: int, num_ranks: int) -> torch.Size:
    """The shape of a rank's shard: rows come in chunks of ceil(rows / ranks), the last ones shorter or empty."""
    rows = tensor.shape[0]
    chunk = -(-rows // num_ranks)
    return torch.Size((min(max(rows - rank * chunk, 0), chunk), *tensor.shape[1:]))


def _split(flat: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    sizes = [shape.numel() for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat[: sum(sizes)].split(sizes), shapes, strict=True)]


COLLECTIVES = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}  # the collectives of a process group, by `resources.device`


PREFIX = "learner"
GLOO = "/gloo/transport/"  # part of gloo's messages: its errors have no class


class RankRendezvous:
    """Joins one rank to the default process group. Rank 0 hosts the rendezvous store."""

    def __init__(self) -> None:
        self._store: RendezvousStore | None = None

    def address(self, timeout_s: float) -> str:
        """`host:port` for all ranks; call it on rank 0."""
        self._store = RendezvousStore(timeout_s)
        return f"{self._store.host}:{self._store.port}"

    def join(self, address: str, *, rank: int, world_size: int, backend: str, timeout_s: float) -> None:
        """Creates the default process group with the ranks at `address`; `timeout_s` bounds every collective."""
        host, port = address.rsplit(":", 1)
        store = join_store(host, int(port), PREFIX, timeout_s)
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)

    def join_as_configured(self, address: str, config: RunConfig, *, rank: int, world_size: int) -> None:
        """`join` with the collectives of `resources.device`; `learner.backend=single` has no process group."""
        if config.learner.backend == "single":
            return
        backend, timeout_s = COLLECTIVES[config.resources.device], config.timeouts.update_s
        self.join(address, rank=rank, world_size=world_size, backend=backend, timeout_s=timeout_s)


def is_peer_lost(error: Exception) -> bool:
    """Whether a rank's error reports the loss or absence of another rank, not a failure of the rank."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and GLOO in str(error))


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
        return self.copied({**_trained_state(policy, optimizer), "version": version}, folder)

    def copied(self, state: dict[str, Any], folder: Path) -> Callable[[], None]:
        """Copies a state of tensors, sharded or whole; the returned function writes it."""
        # Bytes of one rank in host memory. All ranks have the same number: they copy or write together.
        tensors = [t for t in tree_leaves(state) if isinstance(t, Tensor) and t.device.type == "cpu"]
        num_bytes = sum(t.nbytes / (t.device_mesh.size(-1) if isinstance(t, DTensor) else 1) for t in tensors)
        if num_bytes > MAX_COPY_BYTES:
            self.write(state, folder)
            return lambda: None
        return partial(self.write, BlockingAsyncStager(cache_staged_state_dict=False).stage(state), folder)

    def write(self, state: dict[str, Any], folder: Path) -> None:
        write_state(state, folder, self._group)


def load_sharded(folder: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> int:
    """Read this rank's part; returns the version. Collective."""
    state: dict[str, Any] = {**_trained_state(policy, optimizer), "version": 0}
    read_state(state, folder)
    set_state_dict(
        policy, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=PARTIAL
    )
    return int(state["version"])


def saved_shapes(folder: Path) -> dict[str, torch.Size]:
    """Name in the policy -> shape of each trained parameter in a state."""
    entries = read_index(folder).state_dict_metadata.items()
    sizes = {name: saved.size for name, saved in entries if isinstance(saved, TensorStorageMetadata)}
    return {name.removeprefix(MODEL): size for name, size in sizes.items() if name.startswith(MODEL)}


def saved_sharded_weights(folder: Path) -> dict[str, Callable[[], Tensor]]:
    """As `saved_weights`, from any number of ranks."""
    return {name.removeprefix(MODEL): read for name, read in saved_tensors(folder).items() if name.startswith(MODEL)}


def saved_tensors(folder: Path) -> dict[str, Callable[[], Tensor]]:
    """Name -> reader of each tensor that ranks have written to `folder`; read in one process, as a whole."""
    index = read_index(folder)

    def read(name: str, saved: TensorStorageMetadata) -> Tensor:
        state = {name: torch.empty(saved.size, dtype=saved.properties.dtype)}
        read_state(state, folder, index, no_dist=True)
        return state[name]

    entries = index.state_dict_metadata.items()
    return {name: partial(read, name, saved) for name, saved in entries if isinstance(saved, TensorStorageMetadata)}


def _trained_state(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    is_fresh = not optimizer.state
    model_state, optimizer_state = get_state_dict(policy, optimizer)
    if is_fresh:  # torch has taken a step of nothing to fill the state, and Adam corrects its moments by their number
        for moments in optimizer.state.values():
            if "step" in moments:  # Muon's state has none
                moments["step"].zero_()
    frozen = {name for name, p in policy.named_parameters(remove_duplicate=False) if not p.requires_grad}
    trained = {name: tensor for name, tensor in model_state.items() if name not in frozen}
    return {"model": trained, "optimizer": optimizer_state}
