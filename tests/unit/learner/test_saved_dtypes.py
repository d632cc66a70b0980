"""A written policy has the dtypes and the other files of its origin, or the dtype that is asked for."""

import json
from pathlib import Path

import pytest
import torch
from learner_data import tiny_config
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from mobula.learner.backends.single import SingleBackend
from mobula.learner.policies.checkpoint.saving import save_policy
from mobula.learner.policies.loading import load_model
from mobula.learner.policies.tiny import write_tiny
from mobula.learner.policies.trained import as_policy, unread_trained_model
from mobula.learner.policy_weights import PolicyWeights

WEIGHTS, NORM = "model.safetensors", "model.norm.weight"


def rounded(folder: Path, name: str, dtype: torch.dtype, *, tied: bool = False, key: str = "dtype") -> Path:
    """A tiny checkpoint in `dtype`, its last norm in float32."""
    write_tiny(name, folder, tie_word_embeddings=tied)
    state = {n: t if n == NORM else t.to(dtype) for n, t in load_file(folder / WEIGHTS).items()}
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps(settings | {key: str(dtype).removeprefix("torch.")}))
    return folder


def dtypes(folder: Path) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def config_dtype(folder: Path) -> str:
    settings = json.loads((folder / "config.json").read_text())
    return settings.get("dtype") or settings["torch_dtype"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2.5-vl", "smolvlm", "qwen2.5-omni"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_tensors_and_config_keep_their_dtypes(tmp_path: Path, name: str, tied: bool, key: str) -> None:
    folder = rounded(tmp_path / "model", name, torch.bfloat16, tied=tied, key=key)
    model = load_model(str(folder), torch.float32, "sdpa")
    save_policy(model, str(folder), tmp_path / "out", model.state_dict(), model.state_dict().items())
    assert dtypes(tmp_path / "out") == dtypes(folder)
    assert config_dtype(tmp_path / "out") == "bfloat16"
    before, after = load_file(folder / WEIGHTS), load_file(tmp_path / "out" / WEIGHTS)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_another_dtype_is_that_of_all_tensors_and_of_every_part_of_the_config(tmp_path: Path) -> None:
    folder = rounded(tmp_path / "model", "qwen2.5-vl", torch.bfloat16)
    model = load_model(str(folder), torch.float32, "sdpa")
    save_policy(model, str(folder), tmp_path / "out", model.state_dict(), model.state_dict().items(), "float16")
    assert set(dtypes(tmp_path / "out").values()) == {torch.float16}
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    parts = [settings, *(part for part in settings.values() if isinstance(part, dict))]
    assert {part["dtype"] for part in parts if "dtype" in part} == {"float16"}
    assert AutoModelForImageTextToText.from_pretrained(tmp_path / "out").dtype == torch.float16
    model.lm_head.weight.data[0, 0] = 1e6
    with pytest.raises(ValueError, match="lm_head.weight has values that float16 does not hold"):
        save_policy(model, str(folder), tmp_path / "over", model.state_dict(), model.state_dict().items(), "float16")


def test_the_files_beside_the_weights_are_copied_as_they_are(tmp_path: Path) -> None:
    folder = rounded(tmp_path / "model", "llama", torch.bfloat16)
    # transformers loads this file and refuses to write it.
    generation = json.dumps({"temperature": 0.6, "do_sample": False, "eos_token_id": [1, 2]})
    (folder / "generation_config.json").write_text(generation)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    for spare in ("consolidated.safetensors", "model-q4.gguf", "pytorch_model.bin", "README.md"):
        (folder / spare).write_text("x")
    model = load_model(str(folder), torch.float32, "sdpa")
    save_policy(model, str(folder), tmp_path / "out", model.state_dict(), model.state_dict().items())
    assert (tmp_path / "out" / "generation_config.json").read_text() == generation
    assert (tmp_path / "out" / "additional_chat_templates" / "tools.jinja").is_file()
    left_out = {"consolidated.safetensors", "model-q4.gguf", "pytorch_model.bin"}
    assert {f.name for f in (tmp_path / "out").iterdir()} == {f.name for f in folder.iterdir()} - left_out


def test_merged_adapters_keep_the_dtypes_as_well(tmp_path: Path) -> None:
    folder = rounded(tmp_path / "model", "qwen2.5-vl", torch.bfloat16)
    config = tiny_config(folder, "policy.lora.rank=4")
    model, stored = unread_trained_model(config)
    weights = PolicyWeights(model, config)
    backend = SingleBackend(torch.device("cpu"), torch.float32, config.learner)
    backend.wrap(as_policy(model, config), stored)
    save_policy(model, str(folder), tmp_path / "out", weights.described, weights.plain_state(backend))
    assert dtypes(tmp_path / "out") == dtypes(folder)


def test_an_untied_copy_of_a_tied_head_is_not_written(tmp_path: Path) -> None:
    folder = rounded(tmp_path / "model", "llama", torch.bfloat16, tied=True)
    state = load_file(folder / WEIGHTS)
    both = state | {"lm_head.weight": state["model.embed_tokens.weight"].clone()}
    save_file(both, folder / WEIGHTS, metadata={"format": "pt"})
    model = load_model(str(folder), torch.float32, "sdpa")
    save_policy(model, str(folder), tmp_path / "out", model.state_dict(), model.state_dict().items())
    assert dtypes(tmp_path / "out").keys() == state.keys()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.tie_word_embeddings
