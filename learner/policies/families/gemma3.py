"""Gemma 3: one token count for every image, whose tokens see each other in both directions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import Gemma3Processor, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from mobula.configs.schema.rollout import SamplerKind
from mobula.learner.policies.batch import TokenBatch
from mobula.learner.policies.families.base import Size
from mobula.learner.policies.families.vision import VisionFamily

MASKED = ("sdpa", "eager")  # attention of transformers that takes a mask of any form


class Gemma3(VisionFamily):
    """Source: arXiv:2503.19786.

    vLLM's attention on CPU ignores the mask of images without an error (0.01 nat apart), so a run with it takes text
    alone. The prompt's placeholder is another token than the one whose places embeddings take.
    """

    model_types = ("gemma3",)
    media_tokens = r"<start_of_image>|<end_of_image>|<image_soft_token>"
    parts = {"vision": ("vision_tower.",), "connector": ("multi_modal_projector.",), "language": ("language_model.",)}
    needs_gate = True
    padded_because = "its images need a mask; learner.packing=true packs rows of text alone"
    on_cpu = "text alone with vLLM, which ignores the mask of images (0.01 nat); with `sampler=huggingface` images too"
    note = (
        "on CPU vLLM ignores the bidirectional mask of images (0.007 to 0.01 nat in the mean, 0.04 at most), so "
        "`resources.device=cpu` with `sampler=vllm` takes text alone; `sampler=huggingface` takes images on any "
        "device. Engine and learner are compared before the first step. Images were never run on a GPU, where the "
        "presets' tolerance for bfloat16 (0.3 nat) is wider than the effect of the mask on this model: compare with "
        "`resources.dtype=float32` first. Images need `policy.attention=sdpa` and padded rows"
    )

    def without_images_on(self, device: str, sampler: str) -> str:
        if (device, sampler) != ("cpu", SamplerKind.VLLM):
            return ""
        return (
            "policy.model is a Gemma 3, whose images are refused with resources.device=cpu and sampler=vllm: vLLM on "
            "CPU ignores their bidirectional attention (use a GPU, or sampler=huggingface)"
        )

    def compact_placeholder_id(self, config: PreTrainedConfig) -> int:
        return int(config.boi_token_index)

    def spaced(self, text: str, tokenizer: PreTrainedTokenizerBase) -> str:
        """With a blank line on each side of an image, which may become one token with the line ends next to it."""
        return text.replace(tokenizer.boi_token, f"\n\n{tokenizer.boi_token}\n\n")

    def refuse_unfit(self, processor: ProcessorMixin, config: PreTrainedConfig) -> None:
        if processor.image_processor.do_pan_and_scan:
            raise ValueError(
                "policy.model is a Gemma 3 whose preprocessor_config.json has do_pan_and_scan=true, for which engines "
                "attend otherwise: set it to false"
            )

    def expansion(self, processor: ProcessorMixin, size: Size) -> np.ndarray:
        assert isinstance(processor, Gemma3Processor)
        tokenizer = processor.tokenizer
        placeholders = np.full(processor.image_seq_length, tokenizer.image_token_id)
        return np.array([tokenizer.boi_token_id, *placeholders, tokenizer.eoi_token_id], dtype=np.int32)

    def engine_inputs(
        self, config: PreTrainedConfig, images: Sequence[Mapping[str, np.ndarray]]
    ) -> dict[str, np.ndarray | list[np.ndarray]]:
        num_parts = [image["pixel_values"].shape[0] for image in images]
        return super().engine_inputs(config, images) | {"num_patches": np.array(num_parts)}

    def generate_inputs(self, model: PreTrainedModel, token_types: Tensor) -> dict[str, Tensor]:
        return {"token_type_ids": token_types}

    def decoder_inputs(self, core: PreTrainedModel, batch: TokenBatch, token_types: Tensor) -> dict[str, Tensor]:
        attention = core.config.get_text_config()._attn_implementation
        if batch.media.inputs and attention not in MASKED:
            raise ValueError(
                f"policy.model is a Gemma 3, whose images need a mask that the attention {attention} does not take: "
                "set policy.attention=sdpa, learner.packing=false and learner.sequence_parallel=1"
            )
        # Rows of text alone are causal, which every attention computes without a mask.
        return {"token_type_ids": token_types.to(batch.input_ids.device)} if batch.media.inputs else {}

    def blank_image(self, config: PreTrainedConfig, device: torch.device) -> dict[str, Tensor]:
        vision = config.vision_config
        side = vision.image_size
        return {"pixel_values": torch.zeros(1, vision.num_channels, side, side, device=device)}
