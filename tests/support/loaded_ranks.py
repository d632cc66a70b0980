"""Models of several families loaded by ranks that share their weights, beside the same models loaded whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from learner_data import tiny_config
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mobula.configs.schema import RunConfig
from mobula.learner.backends import build_backend, native
from mobula.learner.critic import ValueModel
from mobula.learner.policies.adapters import as_merged
from mobula.learner.policies.checkpoint import unread_policy_model
from mobula.learner.policies.loading import load_model
from mobula.learner.policies.trained import as_policy, unread_trained_model
from mobula.learner.policy_weights import PolicyWeights

CPU = torch.device("cpu")
LORA = "policy.lora.rank=2"


def load_all(
    rank: int, world_size: int, backend: Sequence[str], folders: Sequence[tuple[Path, Sequence[str]]], out: Path
) -> None:
    """Load each of `folders` with its overrides; rank 0 writes the factors and heads that it has drawn to `out`."""
    torch.set_num_threads(1)
    native.MIN_UNIT_NUMEL = 0  # every block is a unit
    store = dist.FileStore(str(out / f"store-{world_size}"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    drawn = {}
    for folder, overrides in folders:
        config = tiny_config(folder, *backend, f"resources.learner.num_workers={world_size}", *overrides)
        drawn[folder.name] = {**check_policy(config), **check_critic(config)}
    if rank == 0:
        torch.save(drawn, out / f"drawn-{world_size}.pt")
    dist.destroy_process_group()


def check_policy(config: RunConfig) -> dict[str, Tensor]:
    """Load the policy of a run; its weights are those of the file, its shard is this rank's part alone. Returns whole
    tensors that are in no file."""
    model, stored = unread_trained_model(config)
    weights = PolicyWeights(model, config)
    backend = build_backend(config.learner, CPU, torch.float32)
    policy = backend.wrap(as_policy(model, config), stored)
    whole = load_model(config.policy.model, torch.float32, config.policy.attention)
    state = dict(backend.full_state())
    check_equal(dict(as_merged(state.items(), 1.0)), whole)
    check_buffers(model, whole)
    check_shares(policy)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert config.policy.lora.is_on or bool(frozen) == bool(config.policy.freeze)
    assert set(weights.manifest.tensors)
    return {name: tensor.clone() for name, tensor in state.items() if ".lora_" in name}


def check_critic(config: RunConfig) -> dict[str, Tensor]:
    model, stored = unread_policy_model(config.policy, torch.float32)
    backend = build_backend(config.learner, CPU, torch.float32)
    critic = ValueModel(model, config.learner, config.seed)
    backend.wrap(critic, stored)
    whole = load_model(config.policy.model, torch.float32, config.policy.attention)
    check_equal(dict(backend.full_state()), whole)
    head = critic.head.weight
    return {"head": (head.full_tensor() if isinstance(head, DTensor) else head).detach().clone()}


def check_equal(state: Mapping[str, Tensor], whole: nn.Module) -> None:
    expected = whole.state_dict()
    for name, tensor in state.items():
        assert torch.equal(tensor, expected[name]), name
    assert expected.keys() - state.keys() <= {"lm_head.weight"}


def check_buffers(model: nn.Module, whole: nn.Module) -> None:
    expected = dict(whole.named_buffers())
    assert all(torch.equal(buffer, expected[name]) for name, buffer in model.named_buffers())


def check_shares(policy: Any) -> None:
    """No rank holds more rows of a parameter than its share of them."""
    num_ranks = dist.get_world_size()
    for name, parameter in policy.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert len(parameter.to_local()) <= -(-len(parameter) // num_ranks), name
