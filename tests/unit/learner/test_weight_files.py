"""Weights written tensor by tensor are the files of `save_pretrained`, with the dtypes and files of their origin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from learner_data import random_groups, tiny_config
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from mobula.learner.backends.single import SingleBackend
from mobula.learner.learner import Learner
from mobula.learner.policies.checkpoint.saving import save_policy, write_weights
from mobula.learner.policies.loading import load_model
from mobula.learner.policies.tiny import write_tiny
from mobula.learner.policies.trained import as_policy, unread_trained_model
from mobula.learner.policy_weights import PolicyWeights

STATE = {
    "b": torch.randn(3, 5),
    "a": torch.randn(7).bfloat16(),
    "steps": torch.arange(4),
    "half": torch.randn(2, 2).half(),
    "one": torch.tensor(2.5),
    "transposed": torch.randn(4, 6).T,
}


def described(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}


@pytest.mark.parametrize("size", ["50GB", "100KB"])
def test_the_files_are_those_of_save_pretrained(tmp_path: Path, size: str) -> None:
    folder = write_tiny("qwen2.5-vl", tmp_path / "model", seed=0, tie_word_embeddings=False)
    model = load_model(str(folder), torch.float32, "sdpa").bfloat16()
    model.model.language_model.norm.float()
    model.save_pretrained(tmp_path / "expected", max_shard_size=size, save_original_format=False)
    state = model.state_dict()
    (tmp_path / "out").mkdir()
    write_weights(tmp_path / "out", "model", described(state), reversed(state.items()), size)
    files = sorted(tmp_path.glob("expected/*.safetensors"))
    assert (len(files) > 1) == (size == "100KB")
    assert [file.name for file in files] == sorted(file.name for file in tmp_path.glob("out/*.safetensors"))
    assert all((tmp_path / "out" / file.name).read_bytes() == file.read_bytes() for file in files)
    if size == "100KB":
        expected, found = (
            json.loads((tmp_path / name / "model.safetensors.index.json").read_text()) for name in ("expected", "out")
        )
        assert found == expected


def test_every_dtype_is_read_back(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save

    write_weights(tmp_path, "model", described(STATE), STATE.items(), "50GB")
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in STATE.items()) and found.keys() == STATE.keys()
    whole = save({name: tensor.contiguous() for name, tensor in STATE.items()}, metadata={"format": "pt"})
    assert (tmp_path / "model.safetensors").read_bytes() == whole


def test_a_tensor_that_never_came_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lacks 1 tensors, such as one"):
        write_weights(tmp_path, "model", described(STATE), [i for i in STATE.items() if i[0] != "one"], "50GB")


def test_an_export_that_fails_gathers_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait for this one in every gather."""
    folder = write_tiny("qwen2.5-vl", tmp_path / "model", seed=0, tie_word_embeddings=False)
    learner = Learner(tiny_config(folder), 0, 1, ())
    learner.connect("")
    gathered = []
    whole = learner._backend.full_state
    monkeypatch.setattr(learner._backend, "full_state", lambda: (gathered.append(n) or (n, t) for n, t in whole()))
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        learner.export(tmp_path / "file")
    assert len(gathered) == len(dict(whole()))
    learner.update(random_groups(AutoTokenizer.from_pretrained(folder), 3, 2), 1)


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
