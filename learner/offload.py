"""Offloader: moves the tensors of a learner rank to host memory and back, for time slices of a colocated GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from mobula.learner.backends.base import Optimizer

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
