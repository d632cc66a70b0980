"""Prompts of a tiny checkpoint of any family, and what the checkpoint's own processor makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoProcessor, AutoTokenizer

from actors.processors.chat import ChatProcessor
from cluster.records.media import MediaStore
from configs.load import load_config
from configs.schema import RunConfig
from deploy.wiring.parity_prompts import Case, cases
from learner.policies.families import family_at


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
        if not family.takes_pictures:
            tokenizer = AutoTokenizer.from_pretrained(self.folder)
            return dict(tokenizer(case.prompt.text, add_special_tokens=False, return_tensors="pt"))
        processor = AutoProcessor.from_pretrained(self.folder, **family.processor_options(self.config.data))
        media = {"images": list(case.pictures)} if case.pictures else {}
        made = processor(text=[case.prompt.text], return_tensors="pt", add_special_tokens=False, **media)
        unused = (*processor.unused_input_names, "num_crops", "batch_num_images")
        return {name: value for name, value in made.items() if name not in unused}


def family_prompts(folder: Path, data: Path) -> FamilyPrompts:
    """Of the checkpoint in `folder`; pictures are written to `data`."""
    config = load_config([
        "experiment=digits", f"policy.model={folder}", "policy.tiny=none", "sampler.max_images_per_prompt=3",
        "data.max_prompt_tokens=512", "sampler.max_model_len=1024",
    ])  # fmt: skip
    store = MediaStore(lambda media: media, config.data.media_cache_bytes)
    processor = ChatProcessor(str(folder), config.data, config.sampler, store, keep_files=False)
    return FamilyPrompts(folder, config, processor, cases(processor, data))
