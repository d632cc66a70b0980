"""Experts are computed by grouped matrix products, which equal transformers' loop over experts."""

from __future__ import annotations

from pathlib import Path

import torch
from learner_data import tiny_config
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from mobula.learner.policies.checkpoint.reading import load_policy_model
from mobula.learner.policies.tiny import write_tiny
from mobula.learner.policies.token import TokenPolicy

EAGER = "eager"


def model(folder: Path) -> PreTrainedModel:
    return load_policy_model(tiny_config(folder).policy, torch.float32)


def trained(policy: PreTrainedModel) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Log-probs [1, 24] of random tokens, gradients of their sum, and the weights after one step of AdamW."""
    ids = torch.randint(0, 200, (1, 25), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, eps=1e-3)
    logits = policy(input_ids=ids).logits[:, :-1]  # [1, 24, V]
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    logprobs.mean().backward()
    gradients = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    optimizer.step()
    return logprobs.detach(), gradients, {name: p.detach() for name, p in policy.named_parameters()}


def test_grouped_products_equal_the_loop_over_experts(tmp_path: Path) -> None:
    folder = write_tiny("qwen3-vl-moe", tmp_path / "moe", seed=1)
    grouped, loop = model(folder), model(folder)
    assert grouped.config.get_text_config()._experts_implementation == "grouped_mm"
    loop.set_experts_implementation(EAGER)
    assert loop.config.get_text_config()._experts_implementation == EAGER
    ours, expected = trained(grouped), trained(loop)
    torch.testing.assert_close(ours[0], expected[0], rtol=0, atol=1e-6)
    for found, wanted in zip(ours[1:], expected[1:], strict=True):
        assert found.keys() == wanted.keys()
        assert any(".experts." in name for name in found)
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


def test_the_experts_of_a_layer_are_in_its_own_unit(tmp_path: Path) -> None:
    config = tiny_config(write_tiny("qwen3-vl-moe", tmp_path / "moe", seed=1))
    policy = TokenPolicy(load_policy_model(config.policy, torch.float32), config.learner)
    blocks = list(policy.blocks())
    experts = [module for module in policy.modules() if hasattr(module, "gate_up_proj")]
    holding = [[block for block in blocks if any(one is module for one in block.modules())] for module in experts]
    assert len(experts) == policy.model.config.get_text_config().num_hidden_layers
    assert [len(found) for found in holding] == [1] * len(experts)
    assert len({id(found[0]) for found in holding}) == len(experts)
    assert all(isinstance(found[0], GradientCheckpointingLayer) for found in holding)
