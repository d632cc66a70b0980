"""Ranks that read their own rows of a checkpoint have the weights that transformers loads whole, bit for bit."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from learner_data import tiny_config
from loaded_ranks import LORA, load_all
from safetensors.torch import load_file, save_file

from mobula.learner.policies.checkpoint.reading import load_policy_model
from mobula.learner.policies.loading import load_model
from mobula.learner.policies.tiny import TINY, write_tiny

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
