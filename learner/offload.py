"""Moves the memory of a learner rank between its device and host memory, while others use the device.

Copies do not block the host: torch has those to host memory in pinned pages, so both ways are fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from mobula.learner.backends.base import Optimizer

HOST = torch.device("cpu")


class Movable(Protocol):
    """Tensors beside the weights."""

    def to(self, device: torch.device) -> None: ...


class Residence:
    """Moves policy and optimizer of one rank; not collective. Where the device is the host nothing moves.

    Of the copies of the weights, those `of_policy` are pushed to engines and move with the policy; those `of_optimizer`
    are read by optimizer steps alone.
    """

    def __init__(
        self,
        policy: nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        *,
        of_policy: Sequence[Movable] = (),
        of_optimizer: Sequence[Movable] = (),
    ) -> None:
        self._policy = policy
        self._optimizer = optimizer
        self._device = device
        self._of_policy = tuple(of_policy)
        self._of_optimizer = tuple(of_optimizer)
        self.is_policy_here = True  # on the device

    def offload(self, part: str) -> None:
        """Move `policy` or `optimizer` to host memory."""
        if part == "policy":
            self._move_policy(HOST)
        else:
            self._move_optimizer(HOST)
        if self._device.type == "cuda":
            torch.cuda.synchronize()  # from here on the copies may be read, and others may take the memory
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Move everything to the device."""
        self._move_policy(self._device)
        self._move_optimizer(self._device)

    @contextmanager
    def policy_here(self) -> Iterator[None]:
        """Have the policy on the device while the body runs, wherever it was."""
        was_here = self.is_policy_here
        if not was_here:
            self._move_policy(self._device)
        try:
            yield
        finally:
            # Back to the host: an engine uses the device in between.
            if not was_here:
                self.offload("policy")

    def _move_policy(self, device: torch.device) -> None:
        self._policy.to(device, non_blocking=True)
        for copy in self._of_policy:
            copy.to(device)
        self.is_policy_here = device == self._device

    def _move_optimizer(self, device: torch.device) -> None:
        for copy in self._of_optimizer:
            copy.to(device)
        assert isinstance(self._optimizer, torch.optim.Optimizer), "the configuration refuses learner.backend=deepspeed"
        for state in self._optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:  # a step count stays where Adam keeps it
                    state[name] = value.to(device, non_blocking=True)
