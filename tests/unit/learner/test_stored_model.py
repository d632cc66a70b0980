"""The names in a checkpoint's files and those of a push, for checkpoints as other tools write them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mobula.learner.policies.checkpoint.stored import (
    StoredModel,
    broken_ties,
    loaded_tensors,
    pushed_tensors,
    stored_model,
)
from mobula.learner.policies.loading import checkpoint_names, load_model
from mobula.learner.policies.tiny import TINY, write_tiny

State = dict[str, Tensor]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def changed(folder: Path, name: str, change: Callable[[State], State], *, tied: bool = False) -> tuple[Path, State]:
    """A tiny checkpoint whose file is changed, and its tensors as transformers loads them."""
    write_tiny(name, folder, tie_word_embeddings=tied)
    file = folder / "model.safetensors"
    state = {n: t.contiguous().clone() for n, t in change(load_file(file)).items()}
    save_file(state, file, metadata={"format": "pt"})
    model = load_model(str(folder), torch.float32, "sdpa")
    own = model.state_dict()
    return folder, {pushed: own[state_name] for state_name, pushed in checkpoint_names(model).items()}


def check_equal(folder: Path, expected: State) -> StoredModel:
    stored = stored_model(folder)
    found = dict(pushed_tensors(folder))
    assert {spec.name: spec.shape for spec in stored.manifest.tensors} == {n: t.shape for n, t in expected.items()}
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
    assert not (stored.missing or stored.misshapen)
    return stored


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", [name for name in TINY if name != "qwen3-vl-moe"])  # stored transposed
def test_a_saved_model_has_the_names_and_tensors_of_a_push(tmp_path: Path, name: str, tied: bool) -> None:
    stored = check_equal(*changed(tmp_path, name, lambda state: state, tied=tied))
    assert not stored.left_out
    assert set(stored.names) == set(stored.tensors)


@pytest.mark.parametrize("kept", [EMBEDDING, HEAD])
def test_an_engine_gets_both_sides_of_a_tie_whichever_the_files_have(tmp_path: Path, kept: str) -> None:
    folder, expected = changed(
        tmp_path,
        "llama",
        lambda state: {kept if name == EMBEDDING else name: t for name, t in state.items()},
        tied=True,
    )
    found = dict(loaded_tensors(folder))
    assert found.keys() == {*expected, HEAD}
    assert torch.equal(found[HEAD], expected[EMBEDDING])
    assert torch.equal(found[EMBEDDING], expected[EMBEDDING])


SPARE: dict[str, tuple[str, bool, Callable[[State], State]]] = {
    "inv_freq of every layer": (
        "llama",
        False,
        lambda state: state | {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(16)},
    ),
    "a head for several tokens": ("qwen3.5", False, lambda state: state | {"mtp.fc.weight": torch.ones(128, 256)}),
    "both sides of a tie": ("llama", True, lambda state: state | {HEAD: state[EMBEDDING]}),
    "both sides of a tie, vision": ("qwen2.5-vl", True, lambda state: state | {HEAD: state[EMBEDDING]}),
    "position ids": (
        "llava",
        False,
        lambda state: state | {"vision_tower.vision_model.embeddings.position_ids": torch.arange(9)[None]},
    ),
}


@pytest.mark.parametrize("kind", SPARE)
def test_known_spare_tensors_are_passed_over_without_a_word(tmp_path: Path, kind: str) -> None:
    name, tied, change = SPARE[kind]
    stored = check_equal(*changed(tmp_path, name, change, tied=tied))
    assert not stored.left_out


RENAMED: dict[str, tuple[str, bool, Callable[[State], State]]] = {
    "the other side of a tie": (
        "llama",
        True,
        lambda state: {HEAD if name == EMBEDDING else name: tensor for name, tensor in state.items()},
    ),
    "a base model without its prefix": (
        "llama",
        True,
        lambda state: {name.removeprefix("model."): tensor for name, tensor in state.items()},
    ),
    "the names of transformers 5": (
        "qwen2.5-vl",
        False,
        lambda state: {
            "model." + name if name.startswith("visual.") else name.replace("model.", "model.language_model."): tensor
            for name, tensor in state.items()
        },
    ),
}


@pytest.mark.parametrize("kind", RENAMED)
def test_other_names_for_the_same_tensors_are_read_as_transformers_reads_them(tmp_path: Path, kind: str) -> None:
    name, tied, change = RENAMED[kind]
    check_equal(*changed(tmp_path, name, change, tied=tied))


def test_tensors_that_are_missing_misshapen_or_unknown_are_named(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file) | {"model.norm.weight": torch.ones(7), "model.layers.2.mlp.up_proj.weight": torch.ones(2)}
    del state[HEAD]
    save_file(state, file, metadata={"format": "pt"})
    stored = stored_model(tmp_path)
    assert stored.missing == (HEAD,)
    assert stored.misshapen == ("model.norm.weight is [7], [128] by config.json",)
    assert stored.left_out == ("model.layers.2.mlp.up_proj.weight",)


def test_a_tie_whose_sides_differ_is_found(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path, tie_word_embeddings=True)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    for factor, broken in ((1, []), (2, [(HEAD, EMBEDDING)])):
        save_file(state | {HEAD: state[EMBEDDING] * factor}, file, metadata={"format": "pt"})
        assert broken_ties(tmp_path, stored_model(tmp_path)) == broken
