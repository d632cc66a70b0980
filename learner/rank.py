"""A rank: one process of a group that shards a model. It joins the group, and saves, loads and moves its part."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from mobula.cluster.errors import CheckpointError
from mobula.cluster.records.media import MediaReader
from mobula.cluster.runtime.gc_tuning import return_free_memory
from mobula.configs.schema import RunConfig
from mobula.learner.backends import build_backend
from mobula.learner.backends.base import Backend, Optimizer
from mobula.learner.backends.sharded import RankRendezvous
from mobula.learner.credit import Credit
from mobula.learner.gradient_step import GradientStep
from mobula.learner.optim import NullAverage, WeightAverage
from mobula.learner.policies.attention.sequence_ranks import SequenceRanks
from mobula.learner.policies.checkpoint import StoredWeights
from mobula.learner.policies.loading import DTYPES, recompute_blocks
from mobula.learner.policies.trained import as_policy, save_trained, unread_trained_model
from mobula.learner.policy_weights import PolicyWeights
from mobula.learner.state_files import load_plain

ALGORITHM_FILE = "algorithm.json"


class CheckpointPart(Protocol):
    """A part of a learner's checkpoint: weights, the critic, an average of the weights."""

    def save(self, folder: Path, version: int) -> Callable[[], None]:
        """Copies the state; the returned function writes it to `folder`. Collective."""

    def load(self, folder: Path) -> int | None:
        """Restores the state written by `save`; returns its version if it has one. Collective."""


class TrainedWeights:
    """Implements `CheckpointPart` for the weights and the optimizer of a backend."""

    def __init__(self, backend: Backend, optimizer: Optimizer) -> None:
        self._backend = backend
        self._optimizer = optimizer

    def save(self, folder: Path, version: int) -> Callable[[], None]:
        return self._backend.save(folder, self._optimizer, version)

    def load(self, folder: Path) -> int:
        return self._backend.load(folder, self._optimizer)


class AlgorithmState:
    """Implements `CheckpointPart` for the state of `credit`, which is JSON and equal on all ranks."""

    def __init__(self, credit: Credit, *, writes: bool) -> None:
        """`writes`: whether this rank is the one that writes the file."""
        self._credit = credit
        self._writes = writes

    def save(self, folder: Path, version: int) -> Callable[[], None]:
        text = json.dumps(self._credit.state())

        def write() -> None:
            if self._writes:
                (folder / ALGORITHM_FILE).write_text(text, encoding="utf-8")

        return write

    def load(self, folder: Path) -> None:
        self._credit.load(load_algorithm(folder))


def load_random_state(folder: Path, rank: int) -> None:
    """Restores the random state of this rank; a rank without a saved state keeps the current state."""
    if _rng_file(folder, rank).is_file():
        torch.set_rng_state(load_plain(_rng_file(folder, rank)))


def load_algorithm(folder: Path) -> dict[str, Any]:
    if not (folder / ALGORITHM_FILE).is_file():
        raise CheckpointError(
            f"{folder / ALGORITHM_FILE} is missing (KL coefficient, reward moments): an older version of the program "
            "wrote this checkpoint, so resume with that version or start a new run"
        )
    return json.loads((folder / ALGORITHM_FILE).read_text(encoding="utf-8"))


def _rng_file(folder: Path, rank: int) -> Path:
    return folder / f"rng_{rank}.pt"


HOST = torch.device("cpu")


@dataclass(eq=False)
class Offloader:
    """Moves policy and optimizer of one rank; not collective. Does nothing if the device is the CPU."""

    policy: nn.Module
    optimizer: Optimizer
    device: torch.device
    _: KW_ONLY
    with_policy: Sequence[WeightAverage | NullAverage] = ()
    """Copies of the weights that are pushed to engines; they move with the policy."""
    with_optimizer: Sequence[WeightAverage | NullAverage] = ()
    """Copies of the weights that only optimizer steps read; they move with the optimizer."""
    is_policy_on_device: bool = field(default=True, init=False)

    def offload(self, part: str) -> None:
        """Moves `policy` or `optimizer` to host memory."""
        if part == "policy":
            self._move_policy(HOST)
        else:
            self._move_optimizer(HOST)
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # copies are asynchronous: wait before they are read and the memory is freed
            torch.cuda.empty_cache()

    def onload(self) -> None:
        self._move_policy(self.device)
        self._move_optimizer(self.device)

    @contextmanager
    def policy_on_device(self) -> Iterator[None]:
        """Moves the policy to the device for the body, and back to the host if it was there before."""
        was_offloaded = not self.is_policy_on_device
        if was_offloaded:
            self._move_policy(self.device)
        try:
            yield
        finally:
            if was_offloaded:
                self.offload("policy")

    # Copies to host memory are non-blocking: torch allocates pinned pages for them, so that both directions are fast.

    def _move_policy(self, device: torch.device) -> None:
        self.policy.to(device, non_blocking=True)
        for copy in self.with_policy:
            copy.to(device)
        self.is_policy_on_device = device == self.device

    def _move_optimizer(self, device: torch.device) -> None:
        for copy in self.with_optimizer:
            copy.to(device)
        assert isinstance(self.optimizer, torch.optim.Optimizer), "the configuration refuses learner.backend=deepspeed"
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:  # Adam keeps its step count on the CPU
                    state[name] = value.to(device, non_blocking=True)


class Rank:
    """Joins the process group of a model. All methods are collective, except `rendezvous_address` and `close`."""

    outgoing: PolicyWeights

    def __init__(self, config: RunConfig, rank: int, world_size: int) -> None:
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._rendezvous = RankRendezvous()
        self.device = torch.device(config.resources.device)
        self.reader = MediaReader(
            timeout_s=config.timeouts.object_s,
            max_items=config.algorithm.prompts_per_step * config.sampler.max_media_per_prompt,
        )

    def rendezvous_address(self) -> str:
        """Returns the `host:port` that all ranks `connect` to. Called on rank 0."""
        return self._rendezvous.address(self._config.timeouts.start_s)

    def connect(self, init_method: str) -> None:
        """Loads the model, joins the process group and shards the model over the ranks."""
        torch.set_num_threads(self._config.resources.learner.num_threads)
        torch.manual_seed(self._config.seed + self._rank)
        ranks = {"rank": self._rank, "world_size": self._world_size}
        self._build(partial(self._rendezvous.join_as_configured, init_method, self._config, **ranks))

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _build(self, join: Callable[[], None]) -> None:
        raise NotImplementedError

    def _read_policy(self) -> tuple[nn.Module, StoredWeights]:
        self._model, weights = unread_trained_model(self._config)
        self._model.train()  # activation checkpointing is for training mode
        recompute_blocks(self._model, self._config.learner.activation_checkpointing)
        return self._model, weights

    def _shard_policy(self, weights: StoredWeights) -> None:
        """Shards the model and reads this rank's part of its weights, after the process group exists."""
        dtype, num_replicas = DTYPES[self._config.resources.dtype], self._config.resources.learner.replicas
        self.backend = build_backend(self._config.learner, self.device, dtype, num_replicas)
        num_sharing = self._config.learner.sequence_parallel
        ranks = SequenceRanks(num_sharing, self.device) if num_sharing > 1 else None
        self.policy = self.backend.wrap(as_policy(self._model, self._config, ranks), weights)

    def _gradient_step(self, optimizer: Optimizer) -> GradientStep:
        return GradientStep(self.backend, optimizer, self._config.learner, self._rank, self._world_size)

    def _save_policy(self, folder: Path) -> None:
        """Writes the policy in the Hugging Face layout; rank 0 writes each tensor as soon as it is gathered."""
        tensors = self.outgoing.plain_state(self.backend)
        try:
            if self._rank == 0:
                save_trained(self._model, self._config, folder, self.outgoing.described, tensors)
        finally:
            # Gather the rest also after a failed write: the other ranks wait in each gather.
            for _ in tensors:
                pass


class Offloadable(Protocol):
    """Weights and optimizer that can be moved to host memory."""

    def offload(self, part: str) -> None: ...

    def onload(self) -> None: ...


class StatefulRank(Rank):
    """A rank whose state is in the checkpoints of a run. `finish_save` is not collective either."""

    _own_folder = ""  # of a learner's state: where this rank writes its random state

    def __init__(self, config: RunConfig, rank: int, world_size: int) -> None:
        super().__init__(config, rank, world_size)
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self.version = 0

    def offload(self, part: str) -> None:
        """Moves `policy` (weights) or `optimizer` to host memory, to free the device for an engine."""
        for movable in self._movable():
            movable.offload(part)

    def onload(self) -> None:
        for movable in self._movable():
            movable.onload()

    def save(self, folder: Path) -> None:
        """Copies the state for an exact resume, and writes the copy in the background."""
        self.finish_save()
        folder.mkdir(parents=True, exist_ok=True)
        writes = [part.save(folder, self.version) for part in self._parts()]
        random_state = torch.get_rng_state()

        def write_all() -> None:
            for write in writes:
                write()
            torch.save(random_state, _rng_file(folder / self._own_folder, self._rank))

        self._writing = self._writer.submit(write_all)

    def finish_save(self) -> None:
        """Waits until the copy is on disk. May run concurrently with any other method."""
        if self._writing is not None:
            self._writing.result()
            return_free_memory()  # of the copy

    def load(self, folder: Path) -> int:
        """Restores a saved state and returns its version."""
        self.finish_save()
        version, *_ = [part.load(folder) for part in self._parts()]
        assert version is not None, "the first part of a state has the version"
        self.version = version
        load_random_state(folder / self._own_folder, self._rank)
        return version

    def restore(self, folder: Path, version: int) -> None:
        """Restores a saved state, which becomes `version`."""
        self.load(folder)
        self.version = version

    def _parts(self) -> Sequence[CheckpointPart]:
        raise NotImplementedError

    def _movable(self) -> Sequence[Offloadable]:
        raise NotImplementedError
