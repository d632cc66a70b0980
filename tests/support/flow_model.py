"""A tiny Stable Diffusion 3 with weights loud enough that its velocity matters, its prompts and a sampler of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import SD3Transformer2DModel

from mobula.actors.samplers.base import EngineSettings
from mobula.actors.samplers.flow import FlowSampler
from mobula.cluster.records.media import MediaHandle, MediaReader, ProcessedMedia
from mobula.cluster.records.partial_response import Attempt, SampledSequence
from mobula.cluster.records.trajectory import MediaSpan, Prompt
from mobula.cluster.roles import SamplingSettings
from mobula.cluster.weight_sync.manifest import checkpoint_manifest
from mobula.learner.policies.flow.checkpoint import FlowCheckpoint
from mobula.learner.policies.flow.denoising import Denoising
from mobula.learner.policies.flow.families import TRANSFORMER, flow_family_at
from mobula.learner.policies.flow.policy import CONDITION
from mobula.learner.policies.flow.tiny import write_tiny_flow

CPU = torch.device("cpu")
NO_IDS = np.empty(0, dtype=np.int32)
DENOISING = Denoising(32, 32, 6, 4.5, "flow_grpo", 0.7, 0, 5, "float32")
SETTINGS = SamplingSettings(num_samples=5, temperature=1.0, max_tokens=1, seed=3)


def write_loud_sd3(folder: Path, seed: int = 0) -> Path:
    """The tiny model with matrices of a larger deviation."""
    return made_loud(write_tiny_flow("sd3", folder, seed=seed), seed)


def made_loud(folder: Path, seed: int = 0) -> Path:
    """The Stable Diffusion 3 in `folder` with matrices of a larger deviation, so that every layer matters."""
    model = SD3Transformer2DModel.from_pretrained(folder, subfolder=TRANSFORMER)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.08, generator=generator)
    model.save_pretrained(folder / TRANSFORMER)
    return folder


def encoded_prompts(folder: Path, texts: Sequence[str], *, with_negative: bool = True) -> list[Prompt]:
    """Prompts with encoded texts as media, and the empty text as the negative prompt."""
    family, pipeline = flow_family_at(folder), FlowCheckpoint(str(folder)).encoder()

    def medium(text: str) -> MediaHandle:
        encoded = family.encode(pipeline, text, 32)
        processed = ProcessedMedia(CONDITION, {k: t.detach().numpy() for k, t in encoded.items()})
        return MediaHandle(f"text {text}", CONDITION, processed.num_bytes, processed, text)

    negatives = (medium(""),) if with_negative else ()
    spans = (MediaSpan(0, 0),) * (1 + len(negatives))
    return [Prompt(f"0/0/{t}", t, t, NO_IDS, NO_IDS, (medium(t), *negatives), spans) for t in texts]


async def flow_sampler(folder: Path, denoising: Denoising = DENOISING, **own: Any) -> FlowSampler:
    """A started sampler."""
    settings = EngineSettings(
        **{
            "model": str(folder),
            "dtype": "float32",
            "device": "cpu",
            "seed": 0,
            "max_model_len": 1,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 1,
            "chunk_tokens": 1,
            "max_images_per_prompt": 2,
            "max_videos_per_prompt": 0,
            "max_audios_per_prompt": 0,
            "tensor_parallel": 1,
            "kv_cache_bytes": 1,
            "keeps_kv_cache": False,
            "sleep_level": 0,
            "reports_load": True,
            "block_size": 1,
            "enforce_eager": True,
            "banned_ids": (),
            "stop_ids": (),
            "pad_id": 0,
            "expected": checkpoint_manifest(folder / TRANSFORMER, "float32"),
            "has_unpushed": False,
            "adapters": None,
            "denoising": denoising,
        }
        | own
    )
    sampler = FlowSampler(settings)
    await sampler.start()
    return sampler


async def sample(sampler: FlowSampler, prompt: Prompt, settings: SamplingSettings = SETTINGS) -> list[SampledSequence]:
    """A group of one prompt."""
    media = MediaReader(timeout_s=1, max_items=8).read(prompt.media)
    return await sampler.sample(prompt, media, replace(settings), Attempt("r0"), lambda *_: None)
