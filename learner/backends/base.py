"""What the learner needs of a way to distribute training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from learner.policies.token import TokenPolicy

Wanted = Callable[[str], bool]


def everything(name: str) -> bool:
    """The wish for every tensor."""
    return True


class Backend(Protocol):
    """How a policy lies in the memory of the ranks, and how its gradients come together.

    Losses are parts of one sum over micro-batches and ranks, so gradients are summed over ranks, not averaged.

    Example:
        backend.wrap(policy)
        optimizer = build_optimizer(policy.parameters(), config)
        for i, loss in enumerate(losses):
            backend.backward(loss, is_last=i == len(losses) - 1)
        grad_norm = backend.step(optimizer, max_grad_norm=1.0)
    """

    def wrap(self, policy: TokenPolicy) -> None:
        """Move the policy to its device and distribute it, in place; before the optimizer is built."""
        ...

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add this loss's gradients; those of all ranks are summed once `is_last` is True."""
        ...

    def step(self, optimizer: torch.optim.Optimizer, *, max_grad_norm: float) -> float:
        """Clip, step and clear the gradients; returns the norm before clipping. If it is not finite, nothing moves."""
        ...

    def inference(self) -> AbstractContextManager[None]:
        """Around forward passes without gradients; nothing of the weights as they were outlives it."""
        ...

    def full_state(self, wanted: Wanted = everything) -> Iterator[tuple[str, Tensor]]:
        """(state-dict name of the model, whole tensor) of what is wanted by name, in the state dict's order, one at a
        time. Collective: all ranks run it to the end.
        """
        ...
