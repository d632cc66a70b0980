"""Optimizers by name: each trains, is saved and resumed exactly, with weights that no gradient reaches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from learner_data import random_groups, tiny_config
from torch import nn
from transformers import AutoTokenizer

from mobula.cluster.errors import CheckpointError
from mobula.configs.load import load_config
from mobula.learner.backends.sharded import ShardedWriter, load_sharded
from mobula.learner.backends.single import SingleBackend
from mobula.learner.learner import Learner
from mobula.learner.optim import OPTIMIZERS, MuonWithAdamW
from mobula.learner.policies.base import Policy


def connected(folder: Path, *overrides: str) -> Learner:
    learner = Learner(tiny_config(folder, "algorithm.max_staleness=9", *overrides), 0, 1, ())
    learner.connect("")
    return learner


def largest_difference(a: Learner, b: Learner) -> float:
    pairs = zip(a._policy.parameters(), b._policy.parameters(), strict=True)
    return max((p - q).abs().max().item() for p, q in pairs)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_an_optimizer_trains_and_a_resumed_run_goes_on_bit_for_bit(folder, tmp_path, name: str) -> None:
    groups = random_groups(AutoTokenizer.from_pretrained(folder), 3, 4)
    first, untrained = (connected(folder, f"learner.optimizer={name}") for _ in range(2))
    first.update(groups, 1)
    assert largest_difference(first, untrained) > 1e-5
    first.save(tmp_path / "state")
    first.finish_save()
    first.update(groups, 2)
    second = connected(folder, f"learner.optimizer={name}")
    second.load(tmp_path / "state")
    second.update(groups, 2)
    assert largest_difference(first, second) == 0


def named() -> list[tuple[str, nn.Parameter]]:
    torch.manual_seed(0)
    shapes = {"layer.weight": (6, 4), "embed_tokens.weight": (6, 4), "lm_head.weight": (6, 4), "norm.weight": (4,)}
    return [(name, nn.Parameter(torch.randn(shape, dtype=torch.float64))) for name, shape in shapes.items()]


def build(parameters: list[tuple[str, nn.Parameter]]) -> MuonWithAdamW:
    return MuonWithAdamW(parameters, lr=0.1, weight_decay=0.0, momentum=0.0, betas=(0.9, 0.99), eps=1e-8)


def test_moments_in_8_bits_take_a_quarter_of_the_memory_and_follow_adamw_over_20_steps() -> None:
    """Both minimise |w - t|^2 with the noise of a minibatch."""
    pytest.importorskip("torchao")
    config = load_config(["experiment=digits", "learner.learning_rate=0.01"]).learner
    torch.manual_seed(0)
    target = torch.randn(64, 128)
    ways = {}
    for name in ("adamw", "adamw_8bit"):
        weight = nn.Parameter(torch.zeros(64, 128))
        optimizer = OPTIMIZERS[name]([("layer.weight", weight)], config)
        noise = torch.Generator().manual_seed(1)
        for step in range(20):
            optimizer.param_groups[0]["lr"] = 0.01 if step < 10 else 0.005  # set as a number, as the learner does
            weight.grad = weight.detach() - target + 0.1 * torch.randn(target.shape, generator=noise)
            optimizer.step()
        ways[name] = weight.detach(), optimizer.state[weight]
    exact, close = ways["adamw"][0], ways["adamw_8bit"][0]
    assert exact.abs().mean() > 0.1
    assert (close - exact).norm() < 0.05 * exact.norm()
    moments = ways["adamw_8bit"][1]
    num_bytes = sum(moments[m].codes.nbytes + moments[m].scale.nbytes for m in ("exp_avg", "exp_avg_sq"))
    assert num_bytes < 0.27 * sum(ways["adamw"][1][m].nbytes for m in ("exp_avg", "exp_avg_sq"))


def test_muon_steps_hidden_matrices_along_a_nearly_orthogonal_direction() -> None:
    """Its singular values are close to one number, whatever those of the gradient are; other parameters take AdamW's
    first step, whose size is the learning rate."""
    parameters = named()
    before = {name: p.detach().clone() for name, p in parameters}
    for _, p in parameters:
        p.grad = torch.randn_like(p)
    parameters[0][1].grad *= torch.tensor([100.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    build(parameters).step()
    moved = {name: p.detach() - before[name] for name, p in parameters}
    values = torch.linalg.svdvals(moved["layer.weight"])
    assert values.max() / values.min() < 2.0
    for name in ("embed_tokens.weight", "lm_head.weight", "norm.weight"):
        torch.testing.assert_close(moved[name].abs(), torch.full_like(moved[name], 0.1))


def test_the_learning_rate_of_both_parts_is_set_at_once() -> None:
    parameters = named()
    optimizer = build(parameters)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [p.detach().clone() for _, p in parameters]
    for _, p in parameters:
        p.grad = torch.randn_like(p)
    optimizer.step()
    assert all(torch.equal(p, old) for (_, p), old in zip(parameters, before, strict=True))


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
    with pytest.raises(CheckpointError, match=r"Missing key in checkpoint state_dict: model\.model\.idle"):
        load_sharded(tmp_path, other, fresh)
