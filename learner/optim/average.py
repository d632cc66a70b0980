"""WeightAverage: an exponential moving average of the trained parameters, in a separate copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from mobula.cluster.errors import CheckpointError
from mobula.learner.state_files import is_complete, read_index, read_state

FOLDER = "average"  # of a learner's state
OFF = {FOLDER: "learner.ema_decay=0", "slow": "algorithm.losses.nft.max_decay=0"}  # what keeps none, by its folder
Copy = Callable[[dict[str, Any], Path], Callable[[], None]]


class WeightAverage:
    """average = decay * average + (1 - decay) * weights, after each optimizer step of RL.

    It has tensors of its own, of this rank's shards, in the type of the weights (float32). Its methods but `update` are
    collective.

    Source: Acceleration of Stochastic Approximation by Averaging, doi:10.1137/0330046.

    Example:
        average = WeightAverage(backend.trained, decay=0.999, copy=ShardedWriter().copied)
        average.begin()  # RL begins with these weights
        optimizer.step()
        average.update()
    """

    folder = FOLDER

    def __init__(self, trained: Callable[[], dict[str, Tensor]], decay: float, copy: Copy) -> None:
        """`trained` returns this rank's shards (`Backend.trained`); `copy(state, folder)` returns a function that
        writes a copy of `state`."""
        self._decay = decay
        self._copy = copy
        self._trained = trained
        self.tensors = {name: weight.detach().clone() for name, weight in trained().items()}

    @torch.no_grad()
    def begin(self) -> None:
        """Resets the average to the current weights."""
        torch._foreach_copy_(local(self.tensors.values()), self._weights())

    @torch.no_grad()
    def update(self) -> None:
        """Adds the current weights to the average."""
        torch._foreach_lerp_(local(self.tensors.values()), self._weights(), 1 - self._decay)

    def _weights(self) -> list[Tensor]:
        return local(self._trained().values())

    def to(self, device: torch.device) -> None:
        """Moves the average; `update` needs it on the device of the weights."""
        self.tensors = {name: tensor.to(device, non_blocking=True) for name, tensor in self.tensors.items()}

    def save(self, folder: Path, version: int) -> Callable[[], None]:
        """Copies the average; the returned function writes the copy to `folder` during training."""
        return self._copy(self.tensors, folder / self.folder)

    def load(self, folder: Path) -> None:
        """Restores the average written by `save`.

        Raises:
            CheckpointError: there is no average in `folder`.
        """
        read_average(folder, self.tensors, no_dist=not dist.is_initialized(), name=self.folder)


class NullAverage:
    """Null object of WeightAverage."""

    def begin(self) -> None: ...

    def update(self) -> None: ...

    def to(self, device: torch.device) -> None: ...

    def save(self, folder: Path, version: int) -> Callable[[], None]:
        return lambda: None

    def load(self, folder: Path) -> None: ...


def refuse_without_average(folder: Path, name: str = FOLDER) -> None:
    """Raises: CheckpointError: there is no average called `name` in a learner's state in `folder`."""
    if not is_complete(folder / name):
        raise CheckpointError(
            f"{folder} holds no average of the weights: a run with {OFF[name]} wrote it, so resume with that, or start "
            "a new run"
        )


def read_average(folder: Path, tensors: dict[str, Tensor], *, no_dist: bool, name: str = FOLDER) -> None:
    """Fill `tensors`, by their names in the policy, with the average called `name` of a learner's state in `folder`.

    Raises:
        CheckpointError: there is none.
    """
    refuse_without_average(folder, name)
    index = read_index(folder / name)
    saved = index.state_dict_metadata
    # DeepSpeed saves its shards flat and padded.
    sizes = {n: tensor.size for n, tensor in saved.items() if isinstance(tensor, TensorStorageMetadata)}
    read = {n: t if sizes[n] == t.shape else t.new_empty(sizes[n]) for n, t in tensors.items()}
    read_state(read, folder / name, index, no_dist=no_dist)
    for n, t in tensors.items():
        if read[n] is not t:
            t.copy_(read[n][: t.numel()].view_as(t))


def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The local shard of each tensor."""
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
