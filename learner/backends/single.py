"""Training in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mobula.configs.schema import LearnerConfig
from mobula.learner.backends.base import Wanted, evaluating, everything, trained_parameters
from mobula.learner.backends.sharded import ShardedWriter, load_sharded
from mobula.learner.optim import build_optimizer
from mobula.learner.policies.base import Policy
from mobula.learner.policies.checkpoint.reading import Weights, fill


class SingleBackend:
    """One process, one device; `dtype` below float32 is reached by autocast."""

    def __init__(self, device: torch.device, dtype: torch.dtype, config: LearnerConfig) -> None:
        self._config = config
        self._device = device
        self._dtype = dtype

    def wrap(self, policy: Policy, weights: Weights = ()) -> Policy:
        fill(policy.model, weights, self._device)
        self._policy = policy.to(self._device)
        if self._dtype is not torch.float32:
            policy.forward = torch.autocast(self._device.type, self._dtype)(policy.forward)
        self._states = ShardedWriter()
        self._trained = trained_parameters(policy)
        return policy

    def optimizer(self) -> torch.optim.Optimizer:
        return build_optimizer(self._policy.named_parameters(), self._config)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        loss.backward()

    def step(self, optimizer: torch.optim.Optimizer, *, max_grad_norm: float) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self._policy.parameters(), max_grad_norm)
        grad_norm = norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item()
        # Skipped on all ranks or on none: shards of one parameter must take the same steps.
        if math.isfinite(grad_norm):  # the same number on every rank
            optimizer.step()
        optimizer.zero_grad()
        return grad_norm

    def inference(self) -> AbstractContextManager[None]:
        return evaluating(self._policy)

    def trained(self) -> dict[str, Tensor]:
        return self._trained

    def full_state(self, wanted: Wanted = everything) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, tensor) for name, tensor in self._policy.model.state_dict().items() if wanted(name))

    def save(self, folder: Path, optimizer: torch.optim.Optimizer, version: int) -> Callable[[], None]:
        return self._states.save(folder, self._policy, optimizer, version)

    def load(self, folder: Path, optimizer: torch.optim.Optimizer) -> int:
        return load_sharded(folder, self._policy, optimizer)
