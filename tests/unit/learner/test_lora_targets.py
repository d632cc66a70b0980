"""`policy.lora.rank` alone adapts every linear layer of the decoder, in every family; parts and layers can be named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from mobula.cluster.weight_sync.manifest import Manifest, TensorSpec
from mobula.configs.load import ConfigError, load_config
from mobula.learner.policies.checkpoint.reading import load_policy_model
from mobula.learner.policies.lora import adapted_modules
from mobula.learner.policies.shapes import shape_of, tiny_shape
from mobula.learner.policies.tiny import TINY, write_tiny
from mobula.learner.policy_weights import PolicyWeights

DECODER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
HYBRID = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
KINDS = {  # where a block is no q, k, v, o, gate, up and down
    "qwen3.5": (*HYBRID, *DECODER),
    "qwen3-vl-moe": DECODER[:4],  # experts are one tensor, and the router is no linear layer
    "glm4v": (*DECODER[:4], "gate_up_proj", "down_proj"),
}
NUMBER = {"qwen3.5": 3 * len(HYBRID) + 4 + 4 * 3}  # three of its four blocks attend linearly


@pytest.mark.parametrize("name", TINY)
def test_rank_alone_adapts_the_linear_layers_of_the_decoder(name: str, tmp_path: Path) -> None:
    folder = write_tiny(name, tmp_path / "model", tie_word_embeddings=True)
    config = load_config(["experiment=own", f"policy.model={folder}", "data.path=none", "policy.lora.rank=4"])
    model = load_policy_model(config.policy, torch.float32)
    blocks = len(next(m for m in model.get_decoder().modules() if isinstance(m, torch.nn.ModuleList)))
    PolicyWeights(model, config)
    decoder, kinds = set(model.get_decoder().modules()), KINDS.get(name, DECODER)
    adapted = {state: module for state, module in model.named_modules() if hasattr(module, "lora_A")}
    assert {state.rpartition(".")[2] for state in adapted} == set(kinds)
    assert all(module in decoder for module in adapted.values())
    assert len(adapted) == NUMBER.get(name, blocks * len(kinds))
    assert all((".lora_" in state) == parameter.requires_grad for state, parameter in model.named_parameters())


@pytest.mark.parametrize("name", ["qwen2.5-vl", "smolvlm", "internvl3", "gemma3"])
def test_the_vision_tower_has_adapters_where_it_is_named(name: str) -> None:
    shape = tiny_shape(name, tie_word_embeddings=False)
    words = ("experiment=own", "policy.model=none", "data.path=none", "policy.lora.rank=4")

    def adapted(targets: str) -> set[str]:
        policy = load_config([*words, f"policy.lora.target_modules=[{targets}]"]).policy
        return set(adapted_modules(shape.manifest, policy, shape))

    language, vision, both = adapted("language"), adapted("vision"), adapted("language,vision")
    assert both == language | vision and not language & vision
    assert vision and all(layer.startswith(shape.parts["vision"]) for layer in vision)
    assert not any("embed" in layer or "lm_head" in layer for layer in both)
    attention = {layer for layer in language if layer.endswith(".down_proj")}
    assert adapted("vision,down_proj") == vision | attention and attention


def test_checkpoints_name_the_decoder_in_several_ways() -> None:
    """Released files of one family differ in the names above the decoder, as transformers has renamed them."""
    shape = tiny_shape("qwen2.5-vl", tie_word_embeddings=False)
    policy = load_config(["experiment=own", "policy.model=none", "data.path=none", "policy.lora.rank=4"]).policy
    usual = set(adapted_modules(shape.manifest, policy, shape))
    renamed = Manifest(
        tuple(
            TensorSpec(
                f"model.language_{spec.name}" if spec.name.startswith("model.") else spec.name, spec.shape, "float32"
            )
            for spec in shape.manifest.tensors
        )
    )
    assert set(adapted_modules(renamed, policy, shape)) == {f"model.language_{layer}" for layer in usual}


def test_a_part_that_the_model_lacks_is_refused_with_those_that_it_has(tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path / "model")
    words = ("experiment=own", f"policy.model={folder}", "data.path=none", "policy.lora.rank=4")
    policy = load_config([*words, "policy.lora.target_modules=[language,vision]"]).policy
    with pytest.raises(
        ValueError, match=r"no matrix of the model is called vision; .*q_proj.* or a part of a token model: language$"
    ):
        adapted_modules(shape_of(str(folder)).manifest, policy)


def test_a_flow_model_needs_the_names_of_its_layers() -> None:
    words = ["experiment=glyphs_grpo", "policy.lora.rank=4"]
    assert "to_q" in load_config(words).policy.lora.target_modules
    with pytest.raises((ConfigError, ValidationError), match=r"target_modules=\[to_q,to_k,to_v,to_out.0\]"):
        load_config([*words, "policy.lora.target_modules=[language]"])


@pytest.mark.parametrize(
    ("experiment", "weights", "adapters"),
    [("own", 1e-6, 1e-5), ("sft", 1e-5, 1e-4), ("dpo", 5e-7, 5e-6)],
)
def test_adapters_have_a_learning_rate_of_their_own(experiment: str, weights: float, adapters: float) -> None:
    words = [f"experiment={experiment}", "policy.model=none", "data.path=none"]
    assert load_config(words).learner.learning_rate == weights
    assert load_config([*words, "policy.lora.rank=16"]).learner.learning_rate == adapters
    named = [*words, "policy.lora.rank=16", "learner.learning_rate=3e-4"]
    assert load_config(named).learner.learning_rate == 3e-4
