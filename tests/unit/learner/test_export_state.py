"""A saved learner state, written for other programs: plain transformers and PEFT compute what the learner computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from learner_data import image, prompt, random_groups, tiny_config
from peft import PeftModel
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from mobula.cluster.errors import CheckpointError
from mobula.configs.schema import RunConfig
from mobula.learner.learner import Learner
from mobula.learner.policies.tiny import write_tiny_qwen2_5_vl
from mobula.learner.policy_weights import export_state

LORA = ("policy.lora.rank=4", "policy.lora.alpha=64.0")


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny"), seed=0, tie_word_embeddings=request.param)


def trained(config: RunConfig) -> Learner:
    learner = Learner(config, 0, 1, ())
    learner.connect("")
    tokenizer = AutoTokenizer.from_pretrained(config.policy.model)
    for version in (1, 2):
        learner.update(random_groups(tokenizer, 6, 4, seed=version), version)
    return learner


def saved(learner: Learner, folder: Path) -> Path:
    learner.save(folder)
    learner.finish_save()
    return folder


def logprobs(model: torch.nn.Module, folder: Path) -> torch.Tensor:
    """float32 [P - 1]: of the tokens of a prompt with an image after the first, by the model's own forward."""
    asked, handle = canary(folder)
    ids = torch.from_numpy(asked.expanded_ids).long()[None]
    inputs = {name: torch.from_numpy(array) for name, array in handle.reference.inputs.items()}
    types = torch.zeros_like(ids)
    for span in asked.media_spans:
        types[0, span.start : span.end] = 1
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=types, **inputs).logits[0, :-1]
    return logits.float().log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]


def canary(folder: Path):
    handle = image(9)
    return prompt(AutoTokenizer.from_pretrained(folder), "canary", [handle]), handle


def load(folder: Path) -> torch.nn.Module:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def test_plain_transformers_computes_what_the_learner_computes(folder: Path, tmp_path: Path) -> None:
    learner = trained(tiny_config(folder, "algorithm.max_staleness=4", "policy.freeze=[visual.]"))
    config = learner._config
    state = saved(learner, tmp_path / "state")
    export_state(config, state, tmp_path / "export", merge=False, average=False)
    expected = torch.from_numpy(learner.sequence_logprobs(canary(folder)[0]))
    torch.testing.assert_close(logprobs(load(tmp_path / "export"), folder), expected, atol=1e-5, rtol=0)
    assert (logprobs(load(folder), folder) - expected).abs().max() > 1e-3, "training moved the policy"
    assert AutoProcessor.from_pretrained(tmp_path / "export").tokenizer.get_vocab()


def test_peft_computes_what_the_learner_computes_and_so_do_the_merged_weights(folder: Path, tmp_path: Path) -> None:
    learner = trained(tiny_config(folder, "algorithm.max_staleness=4", *LORA))
    state = saved(learner, tmp_path / "state")
    export_state(learner._config, state, tmp_path / "adapter", merge=False, average=False)
    export_state(learner._config, state, tmp_path / "merged", merge=True, average=False)
    expected = torch.from_numpy(learner.sequence_logprobs(canary(folder)[0]))
    base = load(folder)
    assert (logprobs(base, folder) - expected).abs().max() > 1e-3, "training moved the policy"
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert adapted.peft_config["default"].base_model_name_or_path == str(folder)
    torch.testing.assert_close(logprobs(adapted, folder), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(logprobs(load(tmp_path / "merged"), folder), expected, atol=1e-5, rtol=0)
    assert sorted(f.name for f in (tmp_path / "adapter").iterdir() if f.suffix in (".json", ".safetensors")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_a_folder_without_a_state_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{tmp_path} holds no complete learner state"):
        export_state(tiny_config(folder), tmp_path, tmp_path / "export", merge=False, average=False)
