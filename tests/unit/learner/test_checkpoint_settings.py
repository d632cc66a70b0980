"""Settings of a checkpoint's files that change neither training nor sampling, or are refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_text_models import write_text_policy
from torch import nn

from mobula.cluster.errors import PreflightError
from mobula.cluster.records.media import MediaReader
from mobula.configs.load import load_config
from mobula.deploy.wiring.preparation import prepare
from mobula.learner.policies.batch import TokenSequence, collate
from mobula.learner.policies.checkpoint.reading import load_policy_model
from mobula.learner.policies.families import unequal_window
from mobula.learner.policies.head import PLAIN
from mobula.learner.policies.loading import RANDOM_PARTS
from mobula.learner.policies.tiny import TINY, write_tiny
from mobula.learner.policies.token import TokenPolicy

CPU = torch.device("cpu")
QWEN = {"sliding_window": 64, "use_sliding_window": True, "layer_types": None}
KINDS = {
    "attention_dropout": 0.5, "hidden_dropout": 0.5, "dropout": 0.5, "activation_dropout": 0.5, "embd_pdrop": 0.5,
    "drop_path_rate": 0.5, "layerdrop": 0.5, "encoder_layerdrop": 0.5, "hidden_dropout_prob": 0.5,
    "attention_probs_dropout_prob": 0.5, "projection_dropout": 0.5,
}  # fmt: skip


def with_dropout(folder: Path) -> Path:
    """The checkpoint with every kind of dropout in every part of its config.json."""

    def set_all(part: dict[str, Any]) -> dict[str, Any]:
        below = {key: set_all(value) if key.endswith("_config") else value for key, value in part.items()}
        return below | KINDS

    file = folder / "config.json"
    file.write_text(json.dumps(set_all(json.loads(file.read_text()))))
    return folder


def trained_twice(folder: Path, *words: str) -> tuple[torch.Tensor, torch.Tensor, nn.Module]:
    """Log-probs of one row in two forward passes in training mode, and the model."""
    config = load_config(["experiment=digits", f"policy.model={folder}", "learner.packing=false", *words])
    policy = TokenPolicy(load_policy_model(config.policy, torch.float32), config.learner).train()
    ids = np.random.default_rng(0).integers(0, 200, 30).astype(np.int32)
    batch = collate([TokenSequence(ids, 10, (), ())], MediaReader(timeout_s=1, max_items=1), CPU)
    with torch.no_grad():
        return policy(batch, PLAIN).logprobs, policy(batch, PLAIN).logprobs, policy.model


def probabilities(model: nn.Module) -> Mapping[str, float]:
    """Those of every random part of training mode."""
    return {
        f"{name}.{key}": value
        for name, module in model.named_modules()
        for key, value in [*vars(module).items(), *([("drop", module.p)] if isinstance(module, nn.Dropout) else [])]
        if isinstance(value, float) and any(part in key for part in RANDOM_PARTS.split("|"))
    }


@pytest.mark.parametrize("name", TINY)
def test_dropout_of_a_checkpoint_is_off_in_training(tmp_path: Path, name: str) -> None:
    first, second, model = trained_twice(with_dropout(write_tiny(name, tmp_path / "m")))
    assert torch.equal(first, second)
    assert probabilities(model) and set(probabilities(model).values()) == {0.0}


def test_dropout_is_kept_where_a_run_asks_for_it(tmp_path: Path) -> None:
    folder = with_dropout(write_tiny("qwen2.5-vl", tmp_path / "m"))
    first, second, model = trained_twice(folder, "policy.dropout=true", "supervision.on_logprob_gap=warn")
    assert (first - second).abs().max() > 0.01
    assert 0.5 in probabilities(model).values()


def edited(folder: Path, **values: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return folder


@pytest.mark.parametrize("key", ["final_logit_softcapping", "attn_logit_softcapping", "logits_scaling", "logit_scale"])
def test_capped_or_scaled_logits_are_refused_by_their_key(tmp_path: Path, key: str) -> None:
    model = edited(write_text_policy(tmp_path / "m", "gemma3_text"), **{key: 30.0})
    with pytest.raises(PreflightError, match=rf"policy\.model=.* has {key}=30\.0 in its config\.json"):
        prepare(load_config(["experiment=own", f"policy.model={model}", f"data.path={tmp_path}"]), lambda media: media)


@pytest.mark.parametrize(
    ("family", "values", "window"),
    [
        ("llama", {}, None),
        ("llama", {"sliding_window": 64}, 64),  # transformers ignores it, vLLM does not
        ("mistral", {"sliding_window": 64}, None),  # all layers in both
        ("mistral", {"sliding_window": None}, None),
        ("gemma3_text", {"sliding_window": 16}, None),  # by layer in both
        ("qwen2", {**QWEN, "use_sliding_window": False}, None),
        (
            "qwen2",
            {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0, "layer_types": None},
            None,
        ),
        # As Qwen 2.5 is released: no layer in transformers, every layer in vLLM.
        ("qwen2", {**QWEN, "max_window_layers": 2}, 64),
        ("qwen2", {**QWEN, "max_window_layers": 1}, 64),
    ],
)
def test_windows_in_which_engine_and_learner_differ_are_found(
    tmp_path: Path, family: str, values: dict[str, Any], window: int | None
) -> None:
    model = edited(write_text_policy(tmp_path / "m", family), **values)
    assert unequal_window(str(model)) == window
    words = ["experiment=own", f"policy.model={model}", f"data.path={tmp_path}", "data.max_prompt_tokens=32"]
    words += ["sampler.max_tokens=16"]
    match = "max_model_len=65 is longer: set sampler.max_model_len=64 or less" if window else "train"
    with pytest.raises(PreflightError, match=match):
        prepare(load_config([*words, "sampler.max_model_len=65"]), lambda media: media)
    with pytest.raises(PreflightError, match="train"):  # the data is what is missing next
        prepare(load_config([*words, "sampler.max_model_len=64"]), lambda media: media)
