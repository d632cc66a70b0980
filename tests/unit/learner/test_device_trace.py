"""A micro-batch on a device: every tensor is there, and the host reads none of them between collation and backward.

Tensors of the device `meta` have shapes and no values. A value that the host asks for, an index of unknown size and a
tensor that was left on the CPU raise there, as they would stall or fail on a GPU.
"""

from __future__ import annotations

import traceback
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_data import group, prompt
from scored_rows import family_prompts, policy_at, reader
from tiny_checkpoints import families, write_text_policy
from transformers import AutoTokenizer, masking_utils

from mobula.cluster.records.actions import KeptSets, LatentActions
from mobula.configs.load import load_config
from mobula.learner.batch import collate_items, fetch_items, tokens_by_age, totals
from mobula.learner.meter import Meter
from mobula.learner.objective import PolicyObjective, measure_gap
from mobula.learner.policies.attention import packed
from mobula.learner.policies.batch import TokenSequence, collate
from mobula.learner.policies.flow.checkpoint import FlowCheckpoint
from mobula.learner.policies.flow.families import flow_family_at
from mobula.learner.policies.flow.policy import FlowPolicy, LatentSequence, StepRescoring, collate_latents
from mobula.learner.policies.flow.tiny import TINY_FLOW, write_tiny_flow
from mobula.learner.policies.head import Distribution
from mobula.learner.policies.tiny import TINY, write_tiny
from mobula.learner.policies.token import TokenPolicy

META = torch.device("meta")
FIRE = Distribution(0.7, (5, 9), first_token_temperature=2.0)
WORDS = ("experiment=digits", "algorithm.kl.coef=0", "resources.reference.num_workers=0")
UNPACKED = ("gemma3", "qwen3.5")  # packing refuses their images or their layers
IMAGES = [name for name in TINY if name not in ("qwen3", "qwen2.5", "llama")]
WAITS = {
    "qwen3-vl": "qwen3_vl",  # DeepStack adds features by a mask
    "qwen3-vl-moe": "qwen3_vl_moe",
    "llava-onevision": "llava_onevision",  # the sizes of images, of which it cuts padding off
    "idefics3": "idefics3",  # the sizes of tiles
    "smolvlm": "smolvlm",
    "glm4v": "glm4v",  # repeats grids
    "qwen2-audio": "masking_utils",  # the mask of sounds
    "qwen2.5-omni": "qwen2_5_omni",  # the lengths of sounds
}
"""Families whose own forward() in transformers reads the device, and the file there that does."""


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes `meta` for a GPU with the kernel for rows, and leaves out what transformers itself reads of the device: one
    count of placeholders a modality, and whether position ids show packed rows."""
    enabled, autocast = torch.is_autocast_enabled, torch.autocast

    def cast(device: str, *args: Any, **options: Any) -> Any:
        return nullcontext() if device == META.type else autocast(device, *args, **options)

    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device="cuda": device != META.type and enabled(device))
    monkeypatch.setattr(torch, "autocast", cast)
    monkeypatch.setattr(torch, "_check_tensor_all_with", lambda *_: None)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda _: None)
    monkeypatch.setattr(packed, "_has_kernel", lambda device: device == META)


def policy(folder: Path, packs: bool) -> TokenPolicy:
    own = policy_at(folder, *WORDS[1:], f"learner.packing={str(packs).lower()}")
    return own.train().to(META, torch.bfloat16)


@pytest.mark.parametrize("packs", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_a_microbatch_of_text_is_computed_without_the_host(tmp_path: Path, name: str, packs: bool) -> None:
    """From rows to the gradient of the whole objective, the meters included."""
    folder, config = write_text_policy(tmp_path / "model", name), load_config(list(WORDS))
    asked = prompt(AutoTokenizer.from_pretrained(folder), "0/0/a")
    [items] = fetch_items([group(asked, [[3, 4, 5], [7]], [1.0, 0.0])], 1, 1.0)
    own, meter = policy(folder, packs), Meter()
    batch = collate_items(items, reader(), META)
    output = own(batch.inputs, FIRE, entropy_has_gradient=True)
    measure_gap(output, batch, tokens_by_age(items), meter)
    PolicyObjective(config.algorithm)(output, batch, totals(items), meter, 0.0).backward()
    assert all(parameter.grad.device == META for parameter in own.parameters())


def test_kept_sets_are_cut_without_the_host(tmp_path: Path) -> None:
    folder = write_text_policy(tmp_path / "model", "qwen2")
    asked = prompt(AutoTokenizer.from_pretrained(folder), "0/0/a")
    kept = KeptSets(np.array([2, 0, 1], dtype=np.int32), np.array([3, 8, 5], dtype=np.int32))
    cut, whole = (TokenSequence.of_response(asked, ids) for ids in (np.array([3, 4, 5]), np.array([6])))
    rows = [replace(cut, kept=kept), whole]
    policy(folder, True)(collate(rows, reader(), META), FIRE).logprobs.sum().backward()


@pytest.mark.families
@pytest.mark.parametrize("name", families(IMAGES, ["qwen2.5-vl"]))
def test_images_and_sounds_are_computed_without_the_host_but_for_transformers(tmp_path: Path, name: str) -> None:
    folder = write_tiny(name, tmp_path / name, seed=0)
    asked = family_prompts(folder, tmp_path).cases.values()
    rows = [TokenSequence.of_response(case.prompt, np.arange(20, 24 + n)) for n, case in enumerate(asked)]
    own, batch = policy(folder, name not in UNPACKED), collate(rows, reader(), META)
    if name not in WAITS:
        own(batch, FIRE).logprobs.sum().backward()
        return
    with pytest.raises((RuntimeError, NotImplementedError)) as caught:
        own(batch, FIRE)
    frames = [frame.filename for frame in traceback.extract_tb(caught.tb) if "/torch/" not in frame.filename]
    assert "/transformers/" in frames[-1] and WAITS[name] in frames[-1]


@pytest.mark.parametrize("name", families(TINY_FLOW, ["sd3"]))
def test_denoising_steps_are_computed_without_the_host(tmp_path: Path, name: str) -> None:
    from flow_run import DENOISING, encoded_prompts

    folder = write_tiny_flow(name, tmp_path / name)
    checkpoint = FlowCheckpoint(str(folder))
    asked = encoded_prompts(folder, ["71", "8"], with_negative=checkpoint.takes_negatives(DENOISING.guidance))
    schedule = checkpoint.schedule(DENOISING)
    shape = checkpoint.latent_shape(DENOISING)
    rows = [LatentSequence.of_response(one, first_steps(n + 2, shape, schedule)) for n, one in enumerate(asked)]
    own = FlowPolicy(checkpoint.transformer(torch.float32).train(), flow_family_at(folder)).to(META)
    own(collate_latents(rows, reader(), META), StepRescoring(DENOISING, "none")).logprobs.sum().backward()


def first_steps(num_steps: int, shape: tuple[int, ...], schedule: Any) -> LatentActions:
    """Of a schedule, between latents of zeros."""
    index = np.arange(num_steps, dtype=np.int32)
    latents = np.zeros((num_steps + 1, *shape), dtype=np.float32)
    return LatentActions(latents, index, schedule.timesteps.numpy()[index], schedule.sigmas.numpy())
