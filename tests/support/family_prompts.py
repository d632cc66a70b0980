"""Prompts of a tiny checkpoint of any family, and what the checkpoint's own processor makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoProcessor, AutoTokenizer

from mobula.actors.processors.chat import ChatProcessor
from mobula.cluster.records.media import MediaStore
from mobula.configs.load import load_config
from mobula.configs.schema import LearnerConfig, RunConfig
from mobula.deploy.checks.parity import MOST_VIDEOS, SOUND_RATE, Case, cases
from mobula.deploy.preflight.decisions import with_row_layout
from mobula.learner.policies.families import family_at
from mobula.learner.policies.families.base import AudioFamily, VideoFamily


def learner_of(folder: Path) -> LearnerConfig:
    """With packed rows where a run with this model packs them."""
    return with_row_layout(load_config(["experiment=digits", f"policy.model={folder}", "policy.tiny=none"])).learner


@dataclass(frozen=True)
class FamilyPrompts:
    """A checkpoint, its processor, and the prompts of the conformance suite."""

    folder: Path
    config: RunConfig
    processor: ChatProcessor
    cases: dict[str, Case]

    def own_inputs(self, name: str) -> dict[str, torch.Tensor]:
        """A case as forward() takes it, by the checkpoint's own processor."""
        case, family = self.cases[name], family_at(str(self.folder))
        hears = isinstance(family, AudioFamily)
        if not family.takes_images and not hears:
            tokenizer = AutoTokenizer.from_pretrained(self.folder)
            return dict(tokenizer(case.prompt.text, add_special_tokens=False, return_tensors="pt"))
        options = family.processor_options(str(self.folder), self.config.data) if family.takes_images else {}
        processor = AutoProcessor.from_pretrained(self.folder, **options)
        media = {"images": list(case.images)} if case.images else {}
        if case.videos:
            videos = [np.stack([np.asarray(frame) for frame in frames]) for frames in case.videos]
            media |= {"videos": videos, "do_sample_frames": False}
        if case.sounds:
            media |= {"audio": list(case.sounds), "sampling_rate": SOUND_RATE}
        made = processor(text=[case.prompt.text], return_tensors="pt", add_special_tokens=False, **media)
        unused = (*processor.unused_input_names, "num_crops", "batch_num_images", "num_audio_tokens")
        return {name: value for name, value in made.items() if name not in unused}


def family_prompts(folder: Path, data: Path) -> FamilyPrompts:
    """Of the checkpoint in `folder`, as a run on a GPU has them; images are written to `data`."""
    family = family_at(str(folder))
    config = load_config([
        "experiment=digits", f"policy.model={folder}", "policy.tiny=none", "sampler.max_images_per_prompt=3",
        "data.max_prompt_tokens=512", "sampler.max_model_len=1024",
        f"sampler.max_audios_per_prompt={2 * isinstance(family, AudioFamily)}",
        f"sampler.max_videos_per_prompt={MOST_VIDEOS * isinstance(family, VideoFamily)}",
    ])  # fmt: skip
    store = MediaStore(lambda media: media, config.data.media_cache_bytes)
    processor = ChatProcessor(str(folder), config.data, config.sampler, store, keep_files=False, device="cuda")
    return FamilyPrompts(folder, config, processor, cases(processor, data))
