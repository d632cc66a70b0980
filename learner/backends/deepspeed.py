"""DeepSpeed ZeRO: gradients and optimizer state are sharded over the ranks (stage 2), or the parameters too (stage 3).

It runs with torch's AdamW and torch's process group, so nothing is compiled and no CUDA toolkit is needed; on CPUs it
works over gloo.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, redirect_stderr, redirect_stdout
from io import StringIO
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from mobula.cluster.errors import CheckpointError
from mobula.configs.schema import LearnerConfig
from mobula.learner.backends.base import Wanted, evaluating, everything, trained_parameters
from mobula.learner.backends.sharded import BUCKET_BYTES
from mobula.learner.optim import build_optimizer
from mobula.learner.policies.base import Policy
from mobula.learner.policies.checkpoint import Rows, Weights, allocate, fill, plain_name, refuse_lacking
from mobula.learner.state_files import load_plain

ENVIRONMENT = {  # settings that DeepSpeed would otherwise detect or log
    "DS_IGNORE_CUDA_DETECTION": "1",  # no nvcc: torch's optimizer needs none of DeepSpeed's own kernels
    "LOCAL_RANK": "0",  # a learner rank sees its own GPU only
}
SHARED_MEMORY = "deepspeed_shm_comm"
TAG = "state"  # the folder below a checkpoint's
RANKS_FILE = "deepspeed.json"


class DeepSpeedBackend:
    """All ranks of the default process group; weights stay float32, compute in `dtype` is reached by autocast.

    One ZeRO engine holds the policy and the only optimizer. Several calls of `optimizer` return proxies of it;
    switching to another proxy resets the moments, as a new optimizer would.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, config: LearnerConfig) -> None:
        self._device = device
        self._dtype = dtype
        self._config = config
        self._turn: _Turn | None = None

    def wrap(self, policy: Policy, weights: Weights = ()) -> nn.Module:
        deepspeed = self._deepspeed = _imported(self._device)
        self._num_ranks = dist.get_world_size()
        self._mesh = init_device_mesh(self._device.type, (self._num_ranks,))
        if self._config.zero_stage == 3:
            self._fill(policy, weights)
        else:
            fill(policy.model, weights, self._device)
        self._policy = policy.to(self._device)
        self._trained = trained_parameters(policy)
        if self._dtype is not torch.float32:
            policy.forward = torch.autocast(self._device.type, self._dtype)(policy.forward)
        self._engine, *_ = deepspeed.initialize(
            model=policy,
            optimizer=build_optimizer(policy.named_parameters(), self._config),
            config=self._settings(),
            dist_init_required=False,
        )
        return self._engine

    def optimizer(self) -> _Turn:
        return _Turn(self._engine.optimizer)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_last)
        self._engine.backward(loss * self._num_ranks)  # ZeRO averages over ranks; the parts of a loss add up

    def step(self, optimizer: _Turn, *, max_grad_norm: float) -> float:
        """ZeRO clips to the norm that it was built with, and leaves out a step whose gradient is not finite."""
        assert max_grad_norm == self._config.max_grad_norm, "the engine was built with learner.max_grad_norm"
        self._take_turn(optimizer)
        self._engine.step()
        return float(self._engine.get_global_grad_norm())

    def inference(self) -> AbstractContextManager[None]:
        return evaluating(self._policy)

    def trained(self) -> dict[str, Tensor]:
        """At stage 3 the flat shards: equally long on each rank, padded at the end of the last one."""
        if self._config.zero_stage == 2:
            return self._trained
        shards = {name: vars(p)["ds_tensor"] for name, p in self._trained.items()}
        return {name: DTensor.from_local(shard, self._mesh, [Shard(0)]) for name, shard in shards.items()}

    def full_state(self, wanted: Wanted = everything) -> Iterator[tuple[str, Tensor]]:
        state = self._policy.model.state_dict(keep_vars=True).items()
        for bucket in _buckets([(name, tensor) for name, tensor in state if wanted(name)]):
            sharded = [tensor for _, tensor in bucket if hasattr(tensor, "ds_id")]
            with self._deepspeed.zero.GatheredParameters(sharded):
                whole = [(name, tensor.detach().clone()) for name, tensor in bucket]
            yield from whole

    def save(self, folder: Path, optimizer: _Turn, version: int) -> Callable[[], None]:
        self._take_turn(optimizer)
        (folder / TAG).mkdir(exist_ok=True)
        self._engine.save_checkpoint(str(folder), TAG, {"version": version}, exclude_frozen_parameters=True)
        if dist.get_rank() == 0:
            (folder / RANKS_FILE).write_text(json.dumps(self._layout()))
        return lambda: None  # DeepSpeed writes on the calling thread alone

    def load(self, folder: Path, optimizer: _Turn) -> int:
        _refuse_incomplete(folder)
        stored = json.loads((folder / RANKS_FILE).read_text())
        if stored != self._layout():
            raise CheckpointError(
                f"{folder} was written with {_shown(stored)} and is to be read with {_shown(self._layout())}: ZeRO "
                "states are read as they were written: set resources.learner.num_workers and learner.zero_stage as "
                "before"
            )
        _refuse_code(folder)
        self._turn = optimizer
        _, client_state = self._engine.load_checkpoint(str(folder), TAG, load_module_strict=False)
        return int(client_state["version"])

    @torch.no_grad()
    def _fill(self, policy: Policy, weights: Weights) -> None:
        """Shares out the parameters block by block, then reads one weight at a time on rank 0. Collective."""
        lacking = set()
        for module in (*policy.blocks(), policy):
            lacking |= allocate(module, self._device)
            self._deepspeed.zero.Init(module=module, config_dict_or_path=self._settings())
        state = {plain_name(name): tensor for name, tensor in policy.model.state_dict(keep_vars=True).items()}
        for name, rows in weights:
            if name in state:
                self._copy(state[name], rows)
                lacking.discard(state[name])
        refuse_lacking(policy.model, lacking)

    def _copy(self, target: Tensor, rows: Rows) -> None:
        """Copies a weight: parameters are scattered from rank 0, buffers are whole on each rank."""
        is_sharded = hasattr(target, "ds_id")
        with self._deepspeed.zero.GatheredParameters([target] if is_sharded else [], modifier_rank=0):
            if not is_sharded or dist.get_rank() == 0:
                target.copy_(rows[...])

    def _layout(self) -> dict[str, int]:
        return {"num_ranks": self._num_ranks, "zero_stage": self._config.zero_stage}

    def _take_turn(self, optimizer: _Turn) -> None:
        if self._turn is not optimizer:
            self._engine.optimizer.optimizer.state.clear()
            self._turn = optimizer

    def _settings(self) -> dict[str, Any]:
        """DeepSpeed's own configuration. Micro-batches are ours: the caller sets where a step ends."""
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self._config.max_grad_norm,
            "zero_allow_untested_optimizer": True,  # torch's fused AdamW
            "zero_force_ds_cpu_optimizer": False,  # torch's AdamW takes an offloaded step too
            "zero_optimization": {"stage": self._config.zero_stage, "overlap_comm": False, **self._offload()},
            "steps_per_print": 1 << 62,
            "wall_clock_breakdown": False,
        }

    def _offload(self) -> dict[str, Any]:
        host = {"device": "cpu", "pin_memory": True}
        match self._config.offload:
            case "none":
                return {}
            case "optimizer":
                return {"offload_optimizer": host}
            case "parameters":
                return {"offload_optimizer": host, "offload_param": host}


class _Turn:
    """Proxy of the engine's only optimizer."""

    def __init__(self, shared: Any) -> None:
        self._shared = shared

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._shared.param_groups


def saved_zero_weights(folder: Path) -> dict[str, Callable[[], Tensor]]:
    """As `saved_weights`, from any number of ranks. Of stage 2 DeepSpeed joins all float32 weights at once."""
    _refuse_incomplete(folder)
    _imported(torch.device("cpu"))
    _refuse_code(folder)
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # it prints its progress
        state = get_fp32_state_dict_from_zero_checkpoint(
            str(folder), TAG, exclude_frozen_parameters=True, lazy_mode=True
        )
    return {name: tensor.contiguous for name, tensor in state.items()}


def _refuse_incomplete(folder: Path) -> None:
    if not (folder / RANKS_FILE).is_file():
        raise CheckpointError(f"{folder} holds no complete DeepSpeed state: use an older checkpoint")


def _refuse_code(folder: Path) -> None:
    """DeepSpeed unpickles its files without a restriction: each is read with one before, and its tensors are mapped."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
        for file in sorted(path for path in (folder / TAG).rglob("*") if path.is_file()):
            load_plain(file, mmap=True)


def _imported(device: torch.device) -> Any:
    """Imports DeepSpeed with preset environment variables, so that it does not probe the machine."""
    for key, value in {**ENVIRONMENT, "DS_ACCELERATOR": device.type}.items():
        os.environ.setdefault(key, value)
    import deepspeed

    # Where ninja and a compiler are installed, each rank would compile a collective in shared memory when it starts:
    # minutes on busy cores, and without an end beside the lock file of a compilation that was killed. Ranks use gloo.
    deepspeed.ops.__compatible_ops__[SHARED_MEMORY] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed


def _buckets(named: list[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Yields consecutive tensors to gather together, about BUCKET_BYTES at most."""
    end, numbered = 0, []
    for name, tensor in named:
        numbered.append((end // BUCKET_BYTES, (name, tensor)))
        end += getattr(tensor, "ds_numel", tensor.numel()) * tensor.element_size()
    for _, bucket in groupby(numbered, key=lambda pair: pair[0]):
        yield [pair for _, pair in bucket]


def _shown(layout: dict[str, int]) -> str:
    return f"{layout['num_ranks']} ranks at ZeRO stage {layout['zero_stage']}"
