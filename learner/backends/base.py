"""The `Backend` protocol: how training is distributed over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mobula.learner.policies.base import Policy
from mobula.learner.policies.checkpoint import Weights

Wanted = Callable[[str], bool]


def everything(name: str) -> bool:
    return True


def trained_parameters(policy: Policy) -> dict[str, Tensor]:
    return {name: p for name, p in policy.named_parameters() if p.requires_grad}


@contextmanager
def evaluating(policy: nn.Module) -> Iterator[None]:
    """Without gradients and without dropout: the same row has the same output whenever it is computed."""
    was_training = policy.training
    policy.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        policy.train(was_training)


class Optimizer(Protocol):
    """Interface of an optimizer: torch's own, or a backend's replacement."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


class Backend(Protocol):
    """Distributes the parameters of a policy over ranks and reduces gradients.

    A backend accepts only optimizers from its `optimizer`; their type differs by backend, so it is Any here.
    Losses are parts of one sum over micro-batches and ranks, so gradients are summed over ranks, not averaged.

    Example:
        policy = backend.wrap(policy, weights)
        optimizer = backend.optimizer()
        for i, loss in enumerate(losses):
            backend.backward(loss, is_last=i == len(losses) - 1)
        grad_norm = backend.step(optimizer, max_grad_norm=1.0)
    """

    def wrap(self, policy: Policy, weights: Weights = ()) -> nn.Module:
        """Distribute the policy, in place, and give its parameters on the meta device memory and the values of
        `weights`; returns what is called in its place. No rank holds more than its shard and one block."""

    def optimizer(self) -> Optimizer:
        """Creates an optimizer over the trained parameters. Several optimizers may be used alternately."""

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Accumulates the gradients of `loss`; sums the gradients of all ranks when `is_last` is True."""

    def step(self, optimizer: Any, *, max_grad_norm: float) -> float:
        """Clips, steps and clears the gradients; returns the norm. A norm that is not finite skips it."""

    def inference(self) -> AbstractContextManager[None]:
        """Context of forward passes without gradients and dropout; frees gathered weights on exit."""

    def trained(self) -> dict[str, Tensor]:
        """This rank's part of each trained parameter, by its name in the policy: a DTensor if it is sharded. Steps
        change these tensors in place."""

    def full_state(self, wanted: Wanted = everything) -> Iterator[tuple[str, Tensor]]:
        """(state-dict name of the model, whole tensor) of what is wanted by name, in the state dict's order, one at a
        time. Collective: all ranks run it to the end."""

    def save(self, folder: Path, optimizer: Any, version: int) -> Callable[[], None]:
        """Copies this rank's part of the trained parameters and of the optimizer's state. Collective.

        The returned function writes the copy; it may run on another thread during training. Backends that can
        write only on the calling thread have written the state on return.
        """

    def load(self, folder: Path, optimizer: Any) -> int:
        """Loads the state written by `save`; returns the version. Collective.

        Raises:
            CheckpointError: the folder holds no complete state, or one that these ranks cannot read.
        """
