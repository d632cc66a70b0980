"""WeightAverage: an exponential moving average of what is trained, a copy beside the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from mobula.cluster.errors import CheckpointError

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
        """Of what is trained, as its backend has it (`Backend.trained`). `copy(state, folder)` returns what writes a
        copy."""
        self._decay = decay
        self._copy = copy
        self._trained = trained
        self.tensors = {name: weight.detach().clone() for name, weight in trained().items()}

    @torch.no_grad()
    def begin(self) -> None:
        """Start again from the weights of this moment."""
        torch._foreach_copy_(local(self.tensors.values()), self._weights())

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights of this moment into the average."""
        torch._foreach_lerp_(local(self.tensors.values()), self._weights(), 1 - self._decay)

    def _weights(self) -> list[Tensor]:
        return local(self._trained().values())

    def to(self, device: torch.device) -> None:
        """Move it; it must be where the weights are when it takes them."""
        self.tensors = {name: tensor.to(device, non_blocking=True) for name, tensor in self.tensors.items()}

    def save(self, folder: Path, version: int) -> Callable[[], None]:
        """Copy it; what is returned writes the copy to `folder`, beside training."""
        return self._copy(self.tensors, folder / self.folder)

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote.

        Raises:
            CheckpointError: there is no average in `folder`.
        """
        read_average(folder, self.tensors, no_dist=not dist.is_initialized(), name=self.folder)


class NullAverage:
    """In the place of a WeightAverage where none is kept."""

    def begin(self) -> None: ...

    def update(self) -> None: ...

    def to(self, device: torch.device) -> None: ...

    def save(self, folder: Path, version: int) -> Callable[[], None]:
        return lambda: None

    def load(self, folder: Path) -> None: ...


def refuse_without_average(folder: Path, name: str = FOLDER) -> None:
    """Raises: CheckpointError: there is no average called `name` in a learner's state in `folder`."""
    if not (folder / name / ".metadata").is_file():
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
    saved = dcp.FileSystemReader(folder / name).read_metadata().state_dict_metadata
    # What DeepSpeed shards is saved flat and padded.
    sizes = {n: one.size for n, one in saved.items() if isinstance(one, TensorStorageMetadata)}
    read = {n: t if sizes[n] == t.shape else t.new_empty(sizes[n]) for n, t in tensors.items()}
    dcp.load(read, checkpoint_id=folder / name, no_dist=no_dist)
    for n, t in tensors.items():
        if read[n] is not t:
            t.copy_(read[n][: t.numel()].view_as(t))


def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The local shard of each tensor."""
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
