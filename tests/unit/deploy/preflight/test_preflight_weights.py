"""Checkpoints that cannot be trained, or that do not fit their config.json, are refused by name before the start."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mobula.cluster.errors import PreflightError
from mobula.configs.load import load_config
from mobula.deploy.preflight.weights import LoadedModel, PreflightFinding, Severity, check_weights, find_unusable
from mobula.deploy.wiring.preparation import checkpoint_folder
from mobula.learner.policies.checkpoint.stored import stored_model
from mobula.learner.policies.tiny import write_tiny

CONFIG, WEIGHTS = "config.json", "model.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny("llama", tmp_path / "model", tie_word_embeddings=True)


def set_config(folder: Path, **values: object) -> None:
    settings = json.loads((folder / CONFIG).read_text()) | values
    (folder / CONFIG).write_text(json.dumps(settings))


def set_weights(folder: Path, **tensors: torch.Tensor) -> None:
    state = {name: t.clone() for name, t in (load_file(folder / WEIGHTS) | tensors).items()}
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})


def findings(folder: Path) -> list[PreflightFinding]:
    config = load_config(["experiment=own", f"policy.model={folder}", "data.path=data"])
    return list(check_weights(config, LoadedModel(folder, None, None, stored_model(folder))))


def write_gguf(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "model-q4_1.gguf")


UNUSABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    **{
        method: (
            lambda folder, method=method: set_config(folder, quantization_config={"quant_method": method, "bits": 4}),
            rf"is quantised \(quantization_config in config.json: {method}\).*: name the checkpoint that it was made",
        )
        for method in ("gptq", "awq", "fp8", "bitsandbytes", "compressed-tensors", "mxfp4")
    },
    "of a part": (
        lambda folder: set_config(folder, text_config={"quantization_config": {"quant_method": "awq"}}),
        "is quantised .*awq",
    ),
    "no method": (lambda folder: set_config(folder, quantization_config={}), r"is quantised .*or remove that entry"),
    "switched off": (
        lambda folder: set_config(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": False}),
        r"is quantised .*bitsandbytes.*or remove that entry",
    ),
    "pickles": (
        lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model-00001-of-00002.bin"),
        r"policy\.model=.* has its weights as pickles \(pytorch_model-00001-of-00002\.bin\).*save_pretrained",
    ),
    "an index of other files": (
        lambda folder: (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors"),
        r"policy\.model: .* holds no safetensors file of weights .*: download or write",
    ),
    "ModelOpt": (lambda folder: (folder / "hf_quant_config.json").write_text("{}"), "hf_quant_config.json"),
    "MLX": (lambda folder: set_config(folder, quantization={"bits": 4, "group_size": 64}), "quantization in config"),
    "no word in config.json": (
        lambda folder: set_weights(folder, **{"up_proj.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}),
        r"up_proj\.weight \(and 0 more\) is stored as F8_E4M3",
    ),
    "GGUF": (write_gguf, r"GGUF file \(model-q4_1\.gguf\).*: name the safetensors checkpoint"),
    "an adapter beside the weights": (
        lambda folder: (folder / "adapter_config.json").write_text("{}"),
        r"has an adapter \(adapter_config.json\).*: merge it",
    ),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_checkpoints_that_cannot_be_trained_are_refused(model: Path, kind: str) -> None:
    assert checkpoint_folder("policy.model", str(model)) == model
    change, message = UNUSABLE[kind]
    change(model)
    with pytest.raises(PreflightError, match=message):
        checkpoint_folder("policy.model", str(model))


def test_a_gguf_file_and_an_adapter_alone_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert "is a GGUF file" in next(iter(find_unusable("policy.model", file))).problem
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(PreflightError, match="is an adapter without its model: merge it"):
        checkpoint_folder("policy.model", str(adapter))


def test_indices_are_no_quantised_weights(model: Path) -> None:
    set_weights(model, **{"position_ids": torch.arange(4)[None], "attn.bias": torch.ones(2, 2).bool()})
    assert not list(find_unusable("policy.model", model))


def test_what_files_lack_or_have_in_another_shape_is_refused_by_name(model: Path) -> None:
    assert not findings(model)
    state = load_file(model / WEIGHTS)
    del state["model.norm.weight"]
    save_file(state | {"model.layers.0.input_layernorm.weight": torch.ones(3)}, model / WEIGHTS, {"format": "pt"})
    lacking, misshapen = findings(model)
    assert "lacks model.norm.weight, which would start from random values" in lacking.problem
    assert "model.layers.0.input_layernorm.weight is [3], [128] by config.json" in misshapen.problem
    assert {lacking.severity, misshapen.severity} == {Severity.REFUSE}


def test_spare_tensors_are_named_and_trained_without(model: Path) -> None:
    set_weights(model, **{"value_head.weight": torch.ones(1, 128)})
    [found] = findings(model)
    assert found.severity is Severity.WARN
    assert "value_head.weight" in found.problem


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.safetensors", "model-00001-of-00002.safetensors"])
def test_of_two_sets_of_weights_the_run_says_which_is_used(model: Path, name: str) -> None:
    (model / name).write_bytes((model / WEIGHTS).read_bytes())
    (model / "training_args.bin").write_bytes(b"")
    [found] = findings(model)
    assert found.severity is Severity.WARN
    assert found.problem.endswith(f"more than one set of weights: {WEIGHTS} is used, {name} is not")


def test_a_tie_that_does_not_hold_is_refused(model: Path) -> None:
    embeddings = load_file(model / WEIGHTS)["model.embed_tokens.weight"]
    set_weights(model, **{"lm_head.weight": embeddings})
    assert not findings(model)
    set_weights(model, **{"lm_head.weight": embeddings + 1})
    [found] = findings(model)
    assert "its lm_head.weight differs from model.embed_tokens.weight" in found.problem
    assert "set tie_word_embeddings to false" in found.action
