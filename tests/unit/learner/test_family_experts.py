"""Experts: their layout in checkpoints, and grouped products."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from learner_data import tiny_config
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from mobula.cluster.weight_sync.manifest import checkpoint_manifest
from mobula.configs.load import load_config
from mobula.configs.schema import RunConfig
from mobula.learner.backends.single import SingleBackend
from mobula.learner.policies.checkpoint.reading import load_policy_model
from mobula.learner.policies.checkpoint.saving import save_policy
from mobula.learner.policies.loading import load_model
from mobula.learner.policies.tiny import write_tiny
from mobula.learner.policies.tiny.models import QWEN3_VL_MOE
from mobula.learner.policies.token import TokenPolicy
from mobula.learner.policy_weights import PolicyWeights

EXPERTS = ".mlp.experts."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("qwen3-vl-moe", tmp_path_factory.mktemp("tiny") / "moe", seed=1)


def config(folder: Path, *words: str) -> RunConfig:
    return load_config(["experiment=digits", f"policy.model={folder}", "policy.tiny=none", *words])


def test_what_is_pushed_is_what_the_checkpoint_holds(folder: Path) -> None:
    asked = config(folder)
    model = load_policy_model(asked.policy, torch.float32)
    weights = PolicyWeights(model, asked)
    weights.manifest.check_against(checkpoint_manifest(folder, "float32"))
    backend = SingleBackend(torch.device("cpu"), torch.float32, asked.learner)
    backend.wrap(TokenPolicy(model, asked.learner))
    stored, pushed = load_file(folder / "model.safetensors"), dict(weights.merged(backend))
    assert pushed.keys() == stored.keys()
    assert all(torch.equal(pushed[name], tensor) for name, tensor in stored.items())
    experts = [name for name in stored if EXPERTS in name]
    assert experts and all(pushed[name].shape != model.state_dict()[name].shape for name in experts)


def test_an_export_is_the_checkpoint_again_for_us_and_for_plain_transformers(folder: Path, tmp_path: Path) -> None:
    model = load_model(str(folder), torch.float32, "sdpa")
    save_policy(model, str(folder), tmp_path / "saved", model.state_dict(), model.state_dict().items())
    stored, saved = (load_file(at / "model.safetensors") for at in (folder, tmp_path / "saved"))
    assert stored.keys() == saved.keys()
    assert all(torch.equal(stored[name], saved[name]) for name in stored)
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_experts_whose_shape_does_not_say_how_they_lie_are_refused(tmp_path: Path) -> None:
    wide = {"moe_intermediate_size": 64}  # gate and up together are as wide as the states
    square = replace(QWEN3_VL_MOE, text=QWEN3_VL_MOE.text | wide)(tmp_path / "square")
    with pytest.raises(ValueError, match=r"gate_up_proj with the square shape \(4, 128, 128\).*other widths"):
        load_model(str(square), torch.float32, "sdpa")


def test_routers_can_be_frozen(folder: Path) -> None:
    frozen = load_policy_model(config(folder, "policy.freeze=[router]").policy, torch.float32)
    fixed = {name for name, parameter in frozen.named_parameters() if not parameter.requires_grad}
    assert fixed == {f"model.language_model.layers.{layer}.mlp.gate.weight" for layer in range(2)}


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
