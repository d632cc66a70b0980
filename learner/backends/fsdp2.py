"""FSDP2: parameters, gradients and optimizer state are sharded over the ranks, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from mobula.configs.schema import LearnerConfig
from mobula.learner.backends.base import Wanted, evaluating, everything, trained_parameters
from mobula.learner.backends.sharded import ShardedWriter, gather_whole
from mobula.learner.backends.single import SingleBackend
from mobula.learner.policies.base import Policy
from mobula.learner.policies.checkpoint.reading import Weights, fill

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
        for module in list(policy.blocks()):
            if _num_parameters(module) >= MIN_UNIT_NUMEL:
                fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload)
        self._root = fully_shard(policy, mesh=mesh, mp_policy=precision, offload_policy=offload)  # the policy itself
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
        yield from gather_whole({name: tensor for name, tensor in state.items() if wanted(name)})


def _num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
