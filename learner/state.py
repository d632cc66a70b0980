"""Learner checkpoints: what is trained and its optimizer, as the backend keeps them, version, random state and the
state of the algorithm. What is frozen comes from `policy.model` again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch

from mobula.cluster.errors import CheckpointError
from mobula.cluster.runtime.gc_tuning import return_free_memory
from mobula.learner.backends.base import Backend, Optimizer

ALGORITHM_FILE = "algorithm.json"


class CheckpointPart(Protocol):
    """Further state in the policy's checkpoint: the critic, the average of the weights."""

    def save(self, folder: Path, version: int) -> Callable[[], None]:
        """Copy its state; what is returned writes it to `folder`. Collective."""
        ...

    def load(self, folder: Path) -> object:
        """Go on from what was written. Collective."""
        ...


class StateWriter:
    """Writes one rank's part of the learner's state on a thread of its own, from a copy of it."""

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
        """Copy the state and begin to write it into `folder`, once the copy before it is written. Collective.

        `algorithm` is JSON that all ranks agree on; rank 0 writes it.
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
        """Begin to write copies, and this rank's random state to `folder`; the copy before is written."""
        random_state = torch.get_rng_state()

        def write_all() -> None:
            for write in writes:
                write()
            torch.save(random_state, _rng_file(folder, self._rank))

        self._writing = self._thread.submit(write_all)

    def finish(self) -> None:
        """Wait until the last copy is on disk.

        Raises:
            OSError: it could not be written.
        """
        if self._writing is not None:
            self._writing.result()
            return_free_memory()  # of the copy


def load_state(
    folder: Path, backend: Backend, optimizer: Optimizer, parts: Sequence[CheckpointPart], rank: int
) -> tuple[int, dict[str, Any]]:
    """Read what this rank wrote to `folder` into policy, optimizer and `parts`; returns the version and the algorithm's
    state. Collective.

    Raises:
        CheckpointError: there is no complete learner state in `folder`, or none that this backend and these ranks read.
    """
    version = backend.load(folder, optimizer)
    for part in parts:
        part.load(folder)
    load_random_state(folder, rank)
    return version, load_algorithm(folder)


def load_random_state(folder: Path, rank: int) -> None:
    """Set the random state of this rank to the saved one; a rank without a saved state keeps its current one."""
    if _rng_file(folder, rank).is_file():
        torch.set_rng_state(torch.load(_rng_file(folder, rank), weights_only=True))


def load_algorithm(folder: Path) -> dict[str, Any]:
    """The algorithm's state in a learner's.

    Raises:
        CheckpointError: it is missing.
    """
    if not (folder / ALGORITHM_FILE).is_file():
        raise CheckpointError(
            f"{folder / ALGORITHM_FILE} is missing (KL coefficient, reward moments): an older version of the program "
            "wrote this checkpoint, so resume with that version or start a new run"
        )
    return json.loads((folder / ALGORITHM_FILE).read_text(encoding="utf-8"))


def _rng_file(folder: Path, rank: int) -> Path:
    return folder / f"rng_{rank}.pt"
