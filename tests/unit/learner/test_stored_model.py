"""Checkpoints and models: the names and tensors of a push, read whole or row by row."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from learner_data import tiny_config
from loaded_ranks import LORA, load_all
from safetensors.torch import load_file, save_file
from torch import Tensor

from mobula.learner.policies.checkpoint.reading import load_policy_model
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


FSDP2 = ("learner=fsdp2",)
SHARED = {
    "qwen2.5-vl": (),
    "qwen3-vl-moe": ("policy.freeze=[router]",),
    "qwen2.5-omni": (LORA,),
    "gemma3": ("policy.freeze=[vision]",),
    "llama": (LORA,),
}
"""Families that two ranks load: windows and grids, transposed experts, a part of a checkpoint, tied weights, text."""


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_read_by_rows_equals_one_that_transformers_loads(
    tmp_path: Path, name: str, tied: bool, dtype: torch.dtype
) -> None:
    folder = write_tiny(name, tmp_path, seed=3, tie_word_embeddings=tied)
    config = tiny_config(folder).policy
    read, loaded = load_policy_model(config, dtype), load_model(str(folder), dtype, config.attention)
    assert read.generation_config.to_dict() == loaded.generation_config.to_dict()
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = dict(getattr(read, kind)()), dict(getattr(loaded, kind)())
        assert ours.keys() == theirs.keys()
        for one, tensor in ours.items():
            assert tensor.dtype == theirs[one].dtype and torch.equal(tensor, theirs[one]), one


def test_ranks_of_any_number_have_the_weights_of_the_files_and_draw_the_same_others(tmp_path: Path) -> None:
    folders = [
        (write_tiny(name, tmp_path / name, seed=3, tie_word_embeddings=name == "gemma3"), overrides)
        for name, overrides in SHARED.items()
    ]
    multiprocessing.set_forkserver_preload(["loaded_ranks"])
    for num_ranks in (1, 2):
        arguments = (num_ranks, FSDP2, folders, tmp_path)
        mp.start_processes(load_all, args=arguments, nprocs=num_ranks, start_method="forkserver")
    one, two = (torch.load(tmp_path / f"drawn-{num_ranks}.pt") for num_ranks in (1, 2))
    for name in SHARED:
        assert one[name].keys() == two[name].keys()
        assert all(torch.equal(tensor, two[name][key]) for key, tensor in one[name].items()), name
    assert any(key.endswith("lora_A.default.weight") for key in one["llama"])


def test_files_that_lack_a_weight_are_refused(tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path)
    file = folder / "model.safetensors"
    state = load_file(file)
    del state["model.norm.weight"]
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"policy.model lacks model.norm.weight and 0 more weights"):
        load_policy_model(tiny_config(folder).policy, torch.float32)
