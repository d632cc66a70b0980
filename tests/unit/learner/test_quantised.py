"""A base in few bits: the product, what engines load, training, state and export."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_rows import ADAM, OTHER, SPEC, call_of, computed, factors_of, rank_with
from learner_data import random_groups, tiny_config
from offline_rows import config_of as offline_config_of
from offline_rows import rows
from one_learner import connected_learner, copied, largest_difference, saved, scorer_of
from tiny_checkpoints import write_text_policy
from torch import nn
from transformers import AutoTokenizer

from mobula.cluster.weight_sync.manifest import checkpoint_manifest
from mobula.configs.errors import ConfigError
from mobula.configs.overrides import overridden
from mobula.configs.schema import RunConfig
from mobula.learner.policies.adapters import adapted_modules, quantised_modules
from mobula.learner.policies.checkpoint import load_policy_model, pushed_tensors
from mobula.learner.policies.quantised import QuantisedLinear, quantise_layers, quantised_layers
from mobula.learner.policies.tiny import TINY
from mobula.learner.policies.trained import write_dequantised
from mobula.learner.policy_weights import export_state

# The 16 values of NormalFloat4: QLoRA (arXiv:2305.14314), appendix E.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
KINDS = ("nf4", "int8")
ALONE = ("policy.lora.rank=4", "weight_sync.payload=adapters", "algorithm.max_staleness=4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY["qwen2.5-vl"](tmp_path_factory.mktemp("base") / "model")


def layer(weight: torch.Tensor, kind: str) -> QuantisedLinear:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(*reversed(weight.shape)))
    quantise_layers(model, ["0"], kind, torch.float32)
    model[0].take(weight, torch.device("cpu"))
    model[0].bias = nn.Parameter(torch.arange(float(len(weight))))
    return model[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_of_the_dequantised_weight_in_both_directions(kind: str) -> None:
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    found = layer(weight, kind)
    inputs = torch.randn(5, 64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    product, dequantised = found(inputs), found.dequantised()
    torch.testing.assert_close(product, inputs @ dequantised.T + found.bias, atol=0, rtol=0)
    (product * torch.arange(48.0)).sum().backward()
    torch.testing.assert_close(inputs.grad, (torch.arange(48.0) @ dequantised).expand(5, 64), atol=1e-4, rtol=1e-5)
    assert not found.weight.requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert found(inputs).dtype == torch.bfloat16


def test_nf4_is_the_nearest_of_the_papers_values_in_blocks_of_64() -> None:
    weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(2))
    found = layer(weight, "nf4").dequantised().numpy().reshape(-1, 64)
    blocks = weight.numpy().reshape(-1, 64)
    scales = np.abs(blocks).max(axis=1, keepdims=True)
    values = np.array(NF4)
    nearest = values[np.abs(blocks[..., None] / scales[..., None] - values).argmin(axis=-1)] * scales
    # Scales have 8 bits; a value between two of the sixteen may go to the other one by rounding.
    assert np.abs(found - nearest).max() <= 0.02 * scales.max() or np.mean(np.abs(found - nearest) > 0.02) < 1e-3
    assert np.abs(found - nearest).mean() < 0.01


def test_int8_is_within_half_a_step_of_each_row() -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
    step = weight.abs().amax(dim=1, keepdim=True) / 127
    assert ((layer(weight, "int8").dequantised() - weight).abs() <= 0.5001 * step).all()


def config(folder: Path, kind: str, *words: str) -> RunConfig:
    return tiny_config(folder, *overridden([*ALONE, f"policy.quantisation={kind}"], words))


@pytest.mark.parametrize("kind", KINDS)
def test_engines_load_the_numbers_that_the_learner_computes_with(kind: str, folder: Path, tmp_path: Path) -> None:
    run = config(folder, kind)
    write_dequantised(run, tmp_path / "base")
    base, learner = dict(pushed_tensors(tmp_path / "base")), connected_learner(run, (250,))
    chosen = quantised_modules(checkpoint_manifest(folder, "float32"), run.policy)
    original = dict(pushed_tensors(folder))
    assert largest_difference(copied(learner), base) == 0
    for name, tensor in original.items():
        is_same = torch.equal(tensor.float(), base[name])
        assert is_same is (name.removesuffix(".weight") not in chosen), name
    assert not any("embed" in module or "lm_head" in module or "visual" in module for module in chosen)
    groups = random_groups(AutoTokenizer.from_pretrained(folder), 4, 2, seed=5)
    scored = scorer_of(run, tmp_path / "base", (250,)).score(groups)
    assert np.isfinite(np.concatenate([row for rows in scored for row in rows])).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_learner_of_it_trains_adapters_resumes_and_exports(kind: str, folder: Path, tmp_path: Path) -> None:
    run, tokenizer = config(folder, kind), AutoTokenizer.from_pretrained(folder)
    learner = connected_learner(run, (250,))
    before = copied(learner)
    for version in (1, 2):
        learner.update(random_groups(tokenizer, 6, 4, seed=version), version)
    state = saved(learner, tmp_path / "state")
    assert largest_difference(copied(learner), before) > 1e-4
    resumed = connected_learner(run, (250,))
    assert resumed.load(state) == 2
    for one in (learner, resumed):
        one.update(random_groups(tokenizer, 6, 4, seed=3), 3)
    assert largest_difference(copied(learner), copied(resumed)) == 0
    export_state(run, state, tmp_path / "adapter", merge=False, average=False)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    merging = export_state(run, state, tmp_path / "merged", merge=True, average=False)
    export_state(run, state, tmp_path / "trained", merge=True, average=False, as_trained=True)
    write_dequantised(run, tmp_path / "base")
    original, base, merged, trained = (
        dict(pushed_tensors(path)) for path in (folder, *(tmp_path / name for name in ("base", "merged", "trained")))
    )
    learner.load(state)
    assert largest_difference(trained, copied(learner)) == 0
    assert largest_difference(merged, original) == pytest.approx(largest_difference(trained, base), rel=1e-3)
    chosen = [f"{name}.weight" for name in quantised_modules(checkpoint_manifest(folder, "float32"), run.policy)]
    error, change, whole = (
        sum((a[name].double() - b[name]).square().sum() for name in chosen) ** 0.5
        for a, b in ((original, base), (trained, base), (trained, dict.fromkeys(chosen, 0)))
    )
    assert merging.error == pytest.approx((float(error / whole), float(change / whole)), rel=1e-4)
    assert merging.error[0] > 0.001


@pytest.mark.parametrize("kind", KINDS)
def test_a_reward_model_of_it_trains_its_head_and_adapters(kind: str, folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    words = (f"policy.quantisation={kind}", "weight_sync.payload=adapters")
    run = offline_config_of(folder, "reward_model_adapters", *words)
    learner = connected_learner(run)
    before, groups = copied(learner), rows(tokenizer, "reward_model")
    for version in (1, 2, 3):
        loss = learner.update(groups, version).metrics["loss"]
    assert learner.assess(groups)["loss"] < loss
    manifest, after = checkpoint_manifest(folder, "float32"), copied(learner)
    assert len(quantised_layers(learner.policy)) == len(quantised_modules(manifest, run.policy))
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    adapted = {f"{name}.weight" for name in adapted_modules(manifest, run.policy)}
    assert {name.replace(".language_model", "") for name in changed} == {"score.weight", *adapted}
    state = saved(learner, tmp_path / "state")
    export_state(run, state, tmp_path / "trained", merge=True, average=False, as_trained=True)
    assert learner.assess(groups) == pytest.approx(
        connected_learner(offline_config_of(tmp_path / "trained", "reward_model")).assess(groups), abs=1e-5
    )


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_a_training_service_are_those_on_the_dequantised_base(kind: str, tmp_path: Path) -> None:
    folder = write_text_policy(tmp_path / "model", "llama")
    words = (f"policy.quantisation={kind}", "sampler.adapters.max_served=2")
    write_dequantised(tiny_config(folder, *words), tmp_path / "base")
    few, whole = rank_with(folder, *words, a=SPEC, b=OTHER), rank_with(tmp_path / "base", a=SPEC, b=OTHER)
    assert quantised_layers(few.policy) and not quantised_layers(whole.policy)
    for seed in (1, 2, 3):
        found, expected = ([computed(r, call_of(name, seed)) for name in "ab"] for r in (few, whole))
        for one, other in zip(found, expected, strict=True):
            assert one.metrics == pytest.approx(other.metrics, rel=1e-5)
        for name in "ab":
            assert few.step(name, ADAM)["grad_norm"] == pytest.approx(whole.step(name, ADAM)["grad_norm"], rel=1e-4)
    for name in "ab":
        assert largest_difference(factors_of(few, name), factors_of(whole, name)) < 1e-5
        few.export(name, tmp_path / name)
        assert (tmp_path / name / "adapter_model.safetensors").is_file()


def test_a_rank_holds_less_than_four_tenths_and_never_the_base_whole(tmp_path: Path) -> None:
    """Bytes of all parameters, of a model whose embeddings are a small part."""
    folder = TINY["qwen2.5-vl"](tmp_path / "model")
    held = {}
    for kind in ("none", "nf4"):
        words = ["policy.quantisation_modules=[language,vision,connector]", "policy.lora.target_modules=[language]"]
        learner = connected_learner(config(folder, kind, *words), (250,))
        layers = {id(layer.weight): layer for layer in quantised_layers(learner.policy).values()}
        held[kind] = sum(
            0.53 * parameter.numel() if id(parameter) in layers else parameter.nbytes
            for parameter in learner.policy.parameters()
            if not parameter.requires_grad
        )
        for quantised in layers.values():
            stored = sum(getattr(quantised.weight, name).nbytes for name in ("quantized_data", "quantized_scalers"))
            assert stored <= 0.53 * quantised.out_features * quantised.in_features
    assert held["nf4"] < 0.6 * held["none"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("policy.lora.rank=0", "weight_sync.payload=weights"), "set policy.lora.rank to 8 or more"),
        (("weight_sync.payload=weights",), "and weight_sync.payload=adapters"),
        (("learner=deepspeed",), "learner.backend=single or fsdp2, got learner.backend=deepspeed"),
    ],
)
def test_what_has_no_frozen_base_is_refused(words: tuple[str, ...], said: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        config(folder, "nf4", *words)


def test_a_whole_model_is_loaded_dequantised_by_others(folder: Path) -> None:
    """Critics and scorers read `policy.model` themselves, in all bits."""
    model = load_policy_model(config(folder, "nf4").policy, torch.float32)
    assert not quantised_layers(model)
