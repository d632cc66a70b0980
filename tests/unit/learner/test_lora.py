"""Adapters: which layers have them, what is trained, pushed, exported and resumed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_data import random_groups, tiny_config
from one_learner import connected_learner, copied, largest_difference, saved, scorer_of
from pydantic import ValidationError
from safetensors.numpy import load_file
from tiny_checkpoints import USUAL_FAMILIES, families
from transformers import AutoTokenizer

from mobula.cluster.errors import WeightSyncError
from mobula.cluster.weight_sync.manifest import Manifest, TensorSpec, checkpoint_manifest
from mobula.cluster.weight_sync.transport import unpack_all
from mobula.configs.load import ConfigError, load_config
from mobula.learner.learner import Learner
from mobula.learner.policies.adapters import AdapterPush, adapted_modules, changed_weights
from mobula.learner.policies.checkpoint import load_policy_model
from mobula.learner.policies.shapes import shape_of, tiny_shape
from mobula.learner.policies.tiny import TINY, write_tiny, write_tiny_qwen2_5_vl
from mobula.learner.policy_weights import PolicyWeights
from mobula.learner.state_files import read_index

Weights = dict[str, np.ndarray]
LORA = ("policy.lora.rank=4", "policy.lora.alpha=6.0", "algorithm.max_staleness=4")  # all groups are of version 0
ALONE = "weight_sync.payload=adapters"


@pytest.fixture(
    scope="module",
    params=[pytest.param(False, id="untied", marks=pytest.mark.exhaustive), pytest.param(True, id="tied")],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny"), seed=0, tie_word_embeddings=request.param)


def learner_of(folder: Path, *overrides: str) -> Learner:
    return connected_learner(tiny_config(folder, *LORA, *overrides), (250,))


def trained(folder: Path, *overrides: str) -> Learner:
    """After two updates."""
    learner, tokenizer = learner_of(folder, *overrides), AutoTokenizer.from_pretrained(folder)
    for version in (1, 2):
        learner.update(random_groups(tokenizer, 6, 4, seed=version), version)
    return learner


def pushed(learner: Learner) -> dict[str, torch.Tensor]:
    """What an engine without a transfer group gets."""
    _, buckets = learner.export_weights(1 << 20)
    return dict(unpack_all(learner.manifest(), 1 << 20, buckets))


def by_hand(folder: Path, factors: dict[str, torch.Tensor]) -> Weights:
    """The checkpoint's weights plus scale * B @ A, in double precision."""
    weights = load_file(folder / "model.safetensors")
    for module in modules_of(factors):
        a, b = (factors[f"{module}.lora_{factor}.weight"].double().numpy() for factor in "AB")
        name, scale = f"{module}.weight", 6.0 / 4
        weights[name] = weights[name].astype(np.float64) + scale * b @ a
    return weights


def modules_of(factors: Iterable[str]) -> set[str]:
    return {name.rpartition(".lora_")[0] for name in factors}


def assert_close(found: Mapping[str, torch.Tensor | np.ndarray], expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_allclose(found[name], weight, atol=1e-6, rtol=0, err_msg=name)


def push_of(folder: Path) -> AdapterPush:
    """What an engine expects."""
    push = AdapterPush.of(folder, checkpoint_manifest(folder, "float32"), tiny_config(folder, *LORA).policy, "float32")
    assert push is not None
    return push


def test_only_adapters_are_trained_and_the_base_stays_as_it_was(folder: Path) -> None:
    learner, fresh = trained(folder, ALONE), learner_of(folder, ALONE)
    factors, merged = pushed(learner), copied(learner)
    assert all(not torch.equal(factors[name], tensor) for name, tensor in pushed(fresh).items())
    moved = {name for name, tensor in copied(fresh).items() if not torch.equal(merged[name], tensor)}
    assert moved == {f"{module}.weight" for module in modules_of(factors)}


def test_before_the_first_step_the_policy_is_the_base(folder: Path) -> None:
    assert_close(copied(learner_of(folder)), load_file(folder / "model.safetensors"))


def test_the_export_is_the_base_plus_the_product_and_loads_as_the_reference(folder: Path, tmp_path: Path) -> None:
    learner = trained(folder, ALONE)
    learner.export(tmp_path)
    expected, base = by_hand(folder, pushed(learner)), load_file(folder / "model.safetensors")
    assert_close(load_file(tmp_path / "model.safetensors"), expected)
    assert max(np.abs(expected[name] - base[name]).max() for name in base) > 1e-4
    groups = random_groups(AutoTokenizer.from_pretrained(folder), 2, 2)
    configs = (tiny_config(folder, *LORA), tiny_config(folder))
    with_words, without = (scorer_of(config, tmp_path, (250,)).score(groups) for config in configs)
    for one, other in zip(with_words, without, strict=True):
        np.testing.assert_array_equal(np.concatenate(one), np.concatenate(other))


def test_a_push_of_adapters_merges_at_the_receiver_to_the_learners_weights(folder: Path) -> None:
    learner = trained(folder, ALONE)
    factors = pushed(learner)
    changed, expected = dict(changed_weights(factors.items(), push_of(folder).base)), by_hand(folder, factors)
    assert_close(changed, {name: expected[name] for name in changed})
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= expected.keys() - changed.keys()
    assert "model.layers.0.self_attn.q_proj.bias" in changed, "engines reload q, k and v with their biases as one"
    assert learner.manifest().num_bytes < checkpoint_manifest(folder, "float32").num_bytes / 4


def test_learner_and_engine_expect_the_same_push(folder: Path) -> None:
    full, push = checkpoint_manifest(folder, "float32"), push_of(folder)
    for payload in ("adapters", "weights"):
        learner = learner_of(folder, f"weight_sync.payload={payload}")
        learner.manifest().check_against(push.manifest if payload == "adapters" else full)
        assert push.is_meant_by(learner.manifest()) == (payload == "adapters")
        sent = [(name, tuple(tensor.shape)) for name, tensor in pushed(learner).items()]
        assert sent == [(spec.name, spec.shape) for spec in learner.manifest().tensors]


def test_an_adapter_without_a_weight_is_refused_by_name(folder: Path) -> None:
    factors = pushed(learner_of(folder, ALONE))
    renamed = {name.replace("layers.1", "layers.7"): tensor for name, tensor in factors.items()}
    with pytest.raises(WeightSyncError, match=r"no weight for the adapters of model\.layers\.7"):
        list(changed_weights(renamed.items(), push_of(folder).base))


def test_the_vision_tower_is_in_or_out_by_policy_freeze(folder: Path) -> None:
    plain = checkpoint_manifest(folder, "float32")
    both = (*LORA, "policy.lora.target_modules=[language,vision]")
    everywhere = adapted_modules(plain, tiny_config(folder, *both).policy)
    text = adapted_modules(plain, tiny_config(folder, *both, "policy.freeze=[visual.]").policy)
    assert {name for name in everywhere if name.startswith("visual.blocks.0")} == {
        f"visual.blocks.0.{name}" for name in ("attn.qkv", "attn.proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    }
    assert text.keys() == {name for name in everywhere if not name.startswith("visual.")}
    assert text.keys() == adapted_modules(plain, tiny_config(folder, *LORA).policy).keys()
    assert not any("visual" in name for name in pushed(learner_of(folder, ALONE, "policy.freeze=[visual.]")))


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ("q_proj,query", "policy.lora.target_modules: no matrix of the model is called query; .*q_proj"),
        ("qkv", "takes away every layer"),
        ("embed_tokens", "embed_tokens is Embedding"),
        ("", "policy.lora.target_modules is empty"),
    ],
)
def test_a_target_that_is_nowhere_or_no_linear_layer_is_refused(folder: Path, targets: str, message: str) -> None:
    with pytest.raises((ValueError, ConfigError), match=message):
        learner_of(folder, f"policy.lora.target_modules=[{targets}]", "policy.freeze=[visual.]")


def test_a_push_of_adapters_without_adapters_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="weight_sync.payload=adapters but policy.lora.rank=0"):
        tiny_config(folder, ALONE)


def test_a_checkpoint_holds_what_is_trained_and_a_resumed_learner_goes_on_bit_for_bit(
    folder: Path, tmp_path: Path
) -> None:
    groups = random_groups(AutoTokenizer.from_pretrained(folder), 3, 4, seed=9)
    first, second = trained(folder), learner_of(folder)
    assert second.load(saved(first, tmp_path / "state")) == 2
    for learner in (first, second):
        learner.update(groups, 3)
    assert largest_difference(copied(first), copied(second)) == 0
    kept = read_index(tmp_path / "state").state_dict_metadata
    assert all(".lora_" in name for name in kept if name.startswith(("model.", "optimizer.state."))), "no frozen weight"


DECODER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
HYBRID = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
KINDS = {  # where a block is no q, k, v, o, gate, up and down
    "qwen3.5": (*HYBRID, *DECODER),
    "qwen3-vl-moe": DECODER[:4],  # experts are one tensor, and the router is no linear layer
    "glm4v": (*DECODER[:4], "gate_up_proj", "down_proj"),
}
NUMBER = {"qwen3.5": 3 * len(HYBRID) + 4 + 4 * 3}  # three of its four blocks attend linearly


@pytest.mark.parametrize("name", families(TINY, (*USUAL_FAMILIES, "glm4v")))
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
    assert vision and all(layer.startswith(shape.family.parts["vision"]) for layer in vision)
    assert not any("embed" in layer or "lm_head" in layer for layer in both)
    attention = {layer for layer in language if layer.endswith(".down_proj")}
    assert adapted("vision,down_proj") == vision | attention and attention


def test_checkpoints_name_the_decoder_in_several_ways() -> None:
    """Released files of one family differ in the names above the decoder, as transformers has renamed them."""
    shape = tiny_shape("qwen2.5-vl", tie_word_embeddings=False)
    policy = load_config(["experiment=own", "policy.model=none", "data.path=none", "policy.lora.rank=4"]).policy

    def renamed(spec: TensorSpec) -> TensorSpec:
        return replace(spec, name=f"model.language_{spec.name}") if spec.name.startswith("model.") else spec

    usual = adapted_modules(shape.manifest, policy, shape)
    found = adapted_modules(Manifest(tuple(map(renamed, shape.manifest.tensors))), policy, shape)
    assert set(found) == {f"model.language_{layer}" for layer in usual}


def test_a_part_that_the_model_lacks_is_refused_with_those_that_it_has(tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path / "model")
    words = ("experiment=own", f"policy.model={folder}", "data.path=none", "policy.lora.rank=4")
    policy = load_config([*words, "policy.lora.target_modules=[language,vision]"]).policy
    message = r"no matrix of the model is called vision; .*q_proj.* or a part of a token model: language$"
    with pytest.raises(ValueError, match=message):
        adapted_modules(shape_of(str(folder)).manifest, policy)


def test_a_flow_model_needs_the_names_of_its_layers() -> None:
    words = ["experiment=glyphs_grpo", "policy.lora.rank=4"]
    assert "to_q" in load_config(words).policy.lora.target_modules
    with pytest.raises((ConfigError, ValidationError), match=r"target_modules=\[to_q,to_k,to_v,to_out.0\]"):
        load_config([*words, "policy.lora.target_modules=[language]"])


@pytest.mark.parametrize(
    ("experiment", "weights", "adapters"), [("own", 1e-6, 1e-5), ("sft", 1e-5, 1e-4), ("dpo", 5e-7, 5e-6)]
)
def test_adapters_have_a_learning_rate_of_their_own(experiment: str, weights: float, adapters: float) -> None:
    words = [f"experiment={experiment}", "policy.model=none", "data.path=none"]
    assert load_config(words).learner.learning_rate == weights
    assert load_config([*words, "policy.lora.rank=16"]).learner.learning_rate == adapters
    named = [*words, "policy.lora.rank=16", "learner.learning_rate=3e-4"]
    assert load_config(named).learner.learning_rate == 3e-4
