"""State of a learner rank: what a checkpoint holds, and residence on the host."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from mobula.cluster.errors import CheckpointError
from mobula.cluster.runtime.gc_tuning import return_free_memory
from mobula.learner.backends.base import Backend, Optimizer
from mobula.learner.state_files import load_plain

ALGORITHM_FILE = "algorithm.json"


class CheckpointPart(Protocol):
    """Additional state in the policy's checkpoint: the critic, the average of the weights."""

    def save(self, folder: Path, version: int) -> Callable[[], None]:
        """Copies the state; the returned function writes it to `folder`. Collective."""
        ...

    def load(self, folder: Path) -> object:
        """Restores the state written by `save`. Collective."""
        ...


class StateWriter:
    """Writes a copy of one rank's part of the learner's state on a separate thread."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(
        self,
        folder: Path,
        backend: Backend,
        optimizer: Optimizer,
        parts: Sequence[CheckpointPart],
        version: int,
        algorithm: dict[str, Any],
    ) -> None:
        """Copies the state and starts to write it into `folder`; waits for the previous write first. Collective.

        `algorithm` is JSON, equal on all ranks; rank 0 writes it.
        """
        self.finish()
        folder.mkdir(parents=True, exist_ok=True)
        algorithm_text = json.dumps(algorithm)

        def write_algorithm() -> None:
            if self._rank == 0:
                (folder / ALGORITHM_FILE).write_text(algorithm_text, encoding="utf-8")

        writes = [backend.save(folder, optimizer, version), *(part.save(folder, version) for part in parts)]
        self.begin([*writes, write_algorithm], folder)

    def begin(self, writes: Sequence[Callable[[], None]], folder: Path) -> None:
        """Starts to write copies, and this rank's random state, to `folder`. The previous write must be complete."""
        random_state = torch.get_rng_state()

        def write_all() -> None:
            for write in writes:
                write()
            torch.save(random_state, _rng_file(folder, self._rank))

        self._writing = self._thread.submit(write_all)

    def finish(self) -> None:
        """Waits until the last copy is on disk."""
        if self._writing is not None:
            self._writing.result()
            return_free_memory()  # of the copy


def load_state(
    folder: Path, backend: Backend, optimizer: Optimizer, parts: Sequence[CheckpointPart], rank: int
) -> tuple[int, dict[str, Any]]:
    """Loads this rank's state in `folder` into policy, optimizer and `parts`; returns the version and the algorithm's
    state. Collective."""
    version = backend.load(folder, optimizer)
    for part in parts:
        part.load(folder)
    load_random_state(folder, rank)
    return version, load_algorithm(folder)


def load_random_state(folder: Path, rank: int) -> None:
    """Restores the random state of this rank; a rank without a saved state keeps the current state."""
    if _rng_file(folder, rank).is_file():
        torch.set_rng_state(load_plain(_rng_file(folder, rank)))


def load_algorithm(folder: Path) -> dict[str, Any]:
    """Reads the algorithm's state from a learner's state."""
    if not (folder / ALGORITHM_FILE).is_file():
        raise CheckpointError(
            f"{folder / ALGORITHM_FILE} is missing (KL coefficient, reward moments): an older version of the program "
            "wrote this checkpoint, so resume with that version or start a new run"
        )
    return json.loads((folder / ALGORITHM_FILE).read_text(encoding="utf-8"))


def _rng_file(folder: Path, rank: int) -> Path:
    return folder / f"rng_{rank}.pt"


HOST = torch.device("cpu")


class Movable(Protocol):
    """A copy of the weights."""

    def to(self, device: torch.device) -> None: ...


class Offloader:
    """Moves policy and optimizer of one rank; not collective. Does nothing if the device is the CPU.

    Args:
        with_policy: copies of the weights that are pushed to engines; they move with the policy.
        with_optimizer: copies of the weights that only optimizer steps read; they move with the optimizer.
    """

    def __init__(
        self,
        policy: nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        *,
        with_policy: Sequence[Movable] = (),
        with_optimizer: Sequence[Movable] = (),
    ) -> None:
        self._policy = policy
        self._optimizer = optimizer
        self._device = device
        self._with_policy = tuple(with_policy)
        self._with_optimizer = tuple(with_optimizer)
        self.is_policy_on_device = True

    def offload(self, part: str) -> None:
        """Moves `policy` or `optimizer` to host memory."""
        if part == "policy":
            self._move_policy(HOST)
        else:
            self._move_optimizer(HOST)
        if self._device.type == "cuda":
            torch.cuda.synchronize()  # copies are asynchronous: wait before they are read and the memory is freed
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Moves policy and optimizer to the device."""
        self._move_policy(self._device)
        self._move_optimizer(self._device)

    @contextmanager
    def policy_on_device(self) -> Iterator[None]:
        """Moves the policy to the device for the body, and back to the host if it was there before."""
        was_offloaded = not self.is_policy_on_device
        if was_offloaded:
            self._move_policy(self._device)
        try:
            yield
        finally:
            if was_offloaded:
                self.offload("policy")

    # Copies to host memory are non-blocking: torch allocates pinned pages for them, so that both directions are fast.

    def _move_policy(self, device: torch.device) -> None:
        self._policy.to(device, non_blocking=True)
        for copy in self._with_policy:
            copy.to(device)
        self.is_policy_on_device = device == self._device

    def _move_optimizer(self, device: torch.device) -> None:
        for copy in self._with_optimizer:
            copy.to(device)
        assert isinstance(self._optimizer, torch.optim.Optimizer), "the configuration refuses learner.backend=deepspeed"
        for state in self._optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:  # Adam keeps its step count on the CPU
                    state[name] = value.to(device, non_blocking=True)
