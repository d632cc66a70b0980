"""Moves the memory of a learner rank between its device and host memory, while others use the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from learner.policies.base import Policy

HOST = torch.device("cpu")


class Residence:
    """Moves policy and optimizer of one rank; not collective. Where the device is the host nothing moves."""

    def __init__(self, policy: Policy, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._policy = policy
        self._optimizer = optimizer
        self._device = device
        self.is_policy_here = True  # on the device

    def offload(self, part: str) -> None:
        """Move `policy` or `optimizer` to host memory."""
        if part == "policy":
            self._move_policy(HOST)
        else:
            self._move_optimizer(HOST)
        if self._device.type == "cuda":
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
            if not was_here:
                self.offload("policy")

    def _move_policy(self, device: torch.device) -> None:
        self._policy.to(device)
        self.is_policy_here = device == self._device

    def _move_optimizer(self, device: torch.device) -> None:
        for state in self._optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:  # a step count stays where Adam keeps it
                    state[name] = value.to(device)
