"""Backends of torch alone: one process, and FSDP2, which shards parameters, gradients and state block by block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from mobula.configs.schema import LearnerConfig
from mobula.learner.backends.base import Wanted, evaluating, everything, trained_parameters
from mobula.learner.backends.sharded import ShardedWriter, gather_whole, load_sharded
from mobula.learner.optim import build_optimizer
from mobula.learner.policies.base import Policy
from mobula.learner.policies.checkpoint import Weights, fill
from mobula.learner.policies.quantised import quantised_layers, with_dequantised


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
        state = self._policy.model.state_dict().items()
        yield from with_dequantised(self._policy.model, ((name, tensor) for name, tensor in state if wanted(name)))

    def save(self, folder: Path, optimizer: torch.optim.Optimizer, version: int) -> Callable[[], None]:
        return self._states.save(folder, self._policy, optimizer, version)

    def load(self, folder: Path, optimizer: torch.optim.Optimizer) -> int:
        return load_sharded(folder, self._policy, optimizer)


MAX_WHOLE_GRADIENT_BYTES = 1 << 30  # a rank keeps whole gradients up to this between the micro-batches of a step
MIN_UNIT_NUMEL = 1 << 20  # exchanging fewer parameters costs its latency: smaller blocks are exchanged with the root


class FSDP2Backend(SingleBackend):
    """All ranks of the default process group; weights keep their type, compute is in `dtype`.

    Each text and vision block is a unit of its own; what is left (embeddings, norms, head, small blocks) is the root.
    The root is the policy itself, so all of it is gathered while the policy's forward runs.

    Gradients are summed in float32. Where the whole ones of a rank are small, the ranks exchange them once a step.
    Otherwise each micro-batch has a reduce-scatter beside its backward pass, and a rank keeps its shard alone: a step
    of n micro-batches sends n times as much.

    With several replicas neighbouring ranks shard one whole model, and only gradients go from one replica to another,
    once a step.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, config: LearnerConfig, num_replicas: int = 1) -> None:
        super().__init__(device, dtype, config)
        self._num_replicas = num_replicas

    def wrap(self, policy: Policy, weights: Weights = ()) -> Policy:
        self._num_ranks = dist.get_world_size()
        self._states = ShardedWriter()
        shape = (self._num_replicas, self._num_ranks // self._num_replicas)
        # FSDP2 replicates over the first axis of two and shards over the last one.
        both = init_device_mesh(self._device.type, shape, mesh_dim_names=("replicate", "shard"))
        mesh = both if self._num_replicas > 1 else both["shard"]
        precision = MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=torch.float32)
        offload = OffloadPolicy() if self._config.offload == "none" else CPUOffloadPolicy()
        whole: Any = {layer.weight for layer in quantised_layers(policy.model).values()}  # not sharded
        shard = partial(fully_shard, mesh=mesh, mp_policy=precision, offload_policy=offload, ignored_params=whole)
        for module in list(policy.blocks()):
            if _num_parameters(module) >= MIN_UNIT_NUMEL:
                shard(module)
        self._root = shard(policy)  # the policy itself
        fill(policy.model, weights, self._device if self._config.offload == "none" else torch.device("cpu"))
        self._policy = policy
        num_trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
        self._keeps_whole_gradients = num_trained * torch.float32.itemsize <= MAX_WHOLE_GRADIENT_BYTES
        self._trained = trained_parameters(policy)  # the shards: between forward and backward others are in their place
        return policy

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        self._root.set_requires_gradient_sync(is_last or not self._keeps_whole_gradients)
        self._root.set_requires_all_reduce(is_last)
        (loss * self._num_ranks).backward()  # FSDP2 averages over ranks; the parts of a loss add up

    @contextmanager
    def inference(self) -> Iterator[None]:
        try:
            with evaluating(self._policy):
                yield
        finally:
            self._root.reshard()  # after a forward the root stays gathered: stale as soon as its shards change

    def full_state(self, wanted: Wanted = everything) -> Iterator[tuple[str, Tensor]]:
        state = self._policy.model.state_dict()
        whole = gather_whole({name: tensor for name, tensor in state.items() if wanted(name)})
        yield from with_dequantised(self._policy.model, whole)


def _num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
