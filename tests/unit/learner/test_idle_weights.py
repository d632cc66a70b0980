"""A weight that no gradient reaches has no optimizer state, and a learner with such weights resumes all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from mobula.configs.load import load_config
from mobula.learner.backends.sharded import ShardedWriter, load_sharded
from mobula.learner.backends.single import SingleBackend
from mobula.learner.policies.base import Policy


class Half(Policy):
    """Of two layers one is read."""

    def __init__(self, names: tuple[str, ...] = ("used", "idle")) -> None:
        super().__init__()
        self.model = nn.ModuleDict({name: nn.Linear(2, 2) for name in names})


def trained(policy: Half) -> tuple[Policy, torch.optim.Optimizer]:
    config = load_config(["experiment=digits", "learner=single", "resources.learner.num_workers=1"]).learner
    backend = SingleBackend(torch.device("cpu"), torch.float32, config)
    own = backend.wrap(policy)
    optimizer = backend.optimizer()
    backend.backward(own.model["used"](torch.ones(1, 2)).sum(), is_last=True)
    backend.step(optimizer, max_grad_norm=1.0)
    return own, optimizer


def test_it_resumes_with_the_state_of_the_others(tmp_path: Path) -> None:
    own, optimizer = trained(Half())
    assert len(optimizer.state) == 2, "weight and bias of the layer that is read"
    ShardedWriter().save(tmp_path, own, optimizer, 3)()
    other, fresh = trained(Half())
    fresh.state.clear()
    assert load_sharded(tmp_path, other, fresh) == 3
    for name, tensor in own.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
    weight, expected = other.model["used"].weight, own.model["used"].weight
    assert torch.equal(fresh.state[weight]["exp_avg"], optimizer.state[expected]["exp_avg"])
    assert fresh.state[weight]["step"] == 1 and fresh.state[other.model["idle"].weight]["step"] == 0


def test_a_weight_that_is_missing_is_still_an_error(tmp_path: Path) -> None:
    ShardedWriter().save(tmp_path, *trained(Half(("used",))), 3)()
    other, fresh = trained(Half())
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: model\.model\.idle"):
        load_sharded(tmp_path, other, fresh)
